//! Generates the gRPC types from `v1/*.proto` when the `rpc` feature asks for them.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    #[cfg(feature = "rpc")]
    {
        let files =
            ["v1/images.proto", "v1/layerfs.proto", "v1/network.proto", "v1/sandboxes.proto"];
        for file in files {
            println!("cargo::rerun-if-changed={file}");
        }
        tonic_prost_build::configure().compile_protos(&files, &["v1"])?;
    }
    println!("cargo::rerun-if-changed=build.rs");
    Ok(())
}
