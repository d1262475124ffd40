//! Archives and container images: what builders read.

use crate::Target;
use crate::seal::tar_sums;
use builder::{BuildOptions, ImageFormat, Silent, Source};
use layer::manifest::LayerKind;
use sha2::{Digest, Sha256};
use std::fs;
use std::path::Path;

/// What a packed archive of a few bytes may become here.
const MAX_UNPACKED_BYTES: u64 = 4 << 20;

fn options() -> BuildOptions {
    BuildOptions {
        max_unpacked_bytes: MAX_UNPACKED_BYTES,
        threads: 1,
        ..BuildOptions::new(LayerKind::Base)
    }
}

/// A tar file, plain or packed; headers get their sums.
pub const ARCHIVE: Target = Target {
    name: "archive",
    run: |data| {
        let mut bytes = data.to_vec();
        tar_sums(&mut bytes);
        let folder = tempfile::tempdir().expect("a temporary directory");
        let path = folder.path().join("archive");
        fs::write(&path, &bytes).expect("written");
        let _ = Source::Archive(path).load(&options(), &Silent);
    },
    seeds: archives,
};

fn archives() -> Vec<Vec<u8>> {
    let mut plain = tar::Builder::new(Vec::new());
    let mut add = |kind: tar::EntryType, path: &str, link: &str, data: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_mtime(1_700_000_000);
        header.set_size(data.len() as u64);
        if link.is_empty() {
            plain.append_data(&mut header, path, data).expect("appended");
        } else {
            plain.append_link(&mut header, path, link).expect("appended");
        }
    };
    add(tar::EntryType::Directory, "d/", "", b"");
    add(tar::EntryType::Regular, "d/file", "", b"content of a file");
    add(tar::EntryType::Link, "d/hard", "d/file", b"");
    add(tar::EntryType::Symlink, "soft", "/d/../d/file", b"");
    add(tar::EntryType::XHeader, "pax", "", b"20 mtime=1.123456789\n");
    add(tar::EntryType::Regular, &"long/".repeat(40), "", b"");
    add(tar::EntryType::Regular, "d/.wh.gone", "", b"");
    let plain = plain.into_inner().expect("finished");
    let packed = zstd::bulk::compress(&plain, 3).expect("packed");
    vec![plain, packed]
}

/// An OCI layout. The input is up to four parts divided by zero bytes: index, manifest, config, layer. In
/// each, `@1` to `@3` stand for the digests of the manifest, the config and the layer.
pub const IMAGE: Target = Target {
    name: "image",
    run: |data| {
        let folder = tempfile::tempdir().expect("a temporary directory");
        lay_out(folder.path(), data).expect("written");
        let source = Source::Image(ImageFormat::OciLayout, folder.path().to_owned(), None);
        let _ = source.load(&options(), &Silent);
    },
    seeds: || {
        let index = r#"{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:@1","size":400}]}"#;
        let manifest = r#"{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:@2","size":100},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"sha256:@3","size":10240}]}"#;
        let config = r#"{"architecture":"amd64","os":"linux","config":{"Env":["A=b"],"Cmd":["sh"]},"rootfs":{"type":"layers","diff_ids":["sha256:@3"]}}"#;
        let nested = index.replace("image.manifest", "image.index");
        let archive = &archives()[1];
        let text = |index: &str| [index, manifest, config].join("\0").into_bytes();
        vec![
            [&text(index)[..], b"\0", archive].concat(),
            [&text(&nested)[..], b"\0", archive].concat(),
        ]
    },
};

fn lay_out(folder: &Path, data: &[u8]) -> std::io::Result<()> {
    let mut parts = data.splitn(4, |byte| *byte == 0).map(<[u8]>::to_vec).collect::<Vec<_>>();
    parts.resize(4, Vec::new());
    let blobs = folder.join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    // From the last to the first, since each names those behind it.
    for at in (1..4).rev() {
        let digest: String =
            Sha256::digest(&parts[at]).iter().map(|byte| format!("{byte:02x}")).collect();
        fs::write(blobs.join(&digest), &parts[at])?;
        for part in &mut parts[..at] {
            *part = replace(part, format!("@{at}").as_bytes(), digest.as_bytes());
        }
    }
    fs::write(folder.join("index.json"), &parts[0])
}

fn replace(text: &[u8], mark: &[u8], by: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.windows(mark.len()).position(|window| window == mark) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(by);
        rest = &rest[at + mark.len()..];
    }
    out.extend_from_slice(rest);
    out
}
