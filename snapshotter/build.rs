//! Generates the gRPC types of containerd from `proto/*.proto`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["types", "snapshots", "images", "content", "leases"]
        .map(|name| format!("proto/{name}.proto"));
    for file in &files {
        println!("cargo::rerun-if-changed={file}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    let builder = tonic_prost_build::configure().include_file("containerd.rs");
    builder.compile_protos(&files, &["proto".to_owned()])?;
    Ok(())
}
