//! Compressed archives are unpacked once into a file without a name, and read by position from there.
//!
//! Memory is bounded by the decoders' windows; the disk by a limit. The kernel frees the spool file
//! when the process ends, however it ends.

use crate::options::BuildOptions;
use crate::path;
use crate::progress::Progress;
use layer::{Context, Error, ErrorKind, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;

const BUFFER_BYTES: usize = 256 << 10;
/// What a decoder of xz may use; the largest preset needs 65 MiB.
const XZ_MEMORY_BYTES: u64 = 128 << 20;

/// How a file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    /// Not at all.
    None,
    /// gzip, of any number of members.
    Gzip,
    /// zstd, of any number of frames, skippable ones included.
    Zstd,
    /// xz, of any number of streams.
    Xz,
}

impl Compression {
    /// Tells by the first bytes. Known kinds that cannot be read are errors.
    pub(crate) fn detect(first: &[u8]) -> Result<Self> {
        let starts = |magic: &[u8]| first.starts_with(magic);
        let skippable =
            first.len() >= 4 && first[0] & 0xf0 == 0x50 && first[1..4] == *b"\x2a\x4d\x18";
        if starts(b"\x1f\x8b") {
            Ok(Self::Gzip)
        } else if starts(b"\x28\xb5\x2f\xfd") || skippable {
            Ok(Self::Zstd)
        } else if starts(b"\xfd7zXZ\0") {
            Ok(Self::Xz)
        } else {
            let foreign: [(&[u8], &str); 5] = [
                (b"BZh", "bzip2"),
                (b"PK\x03\x04", "zip"),
                (b"\x1f\x9d", "compress"),
                (b"LZIP", "lzip"),
                (b"7z\xbc\xaf", "7z"),
            ];
            match foreign.iter().find(|(magic, _)| starts(magic)) {
                Some((_, name)) => Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("{name} files cannot be read; use plain, gz, zst or xz"),
                )),
                None => Ok(Self::None),
            }
        }
    }
}

/// Unpacks `source` into a spool file; `name` is for messages.
pub(crate) fn unpack(
    source: impl Read + Send,
    compression: Compression,
    name: &str,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<File> {
    let source = BufReader::with_capacity(BUFFER_BYTES, source);
    let mut reader: Box<dyn Read + Send> = match compression {
        Compression::None => Box::new(source),
        Compression::Gzip => Box::new(Gunzip::new(source)),
        Compression::Zstd => {
            Box::new(zstd::stream::read::Decoder::with_buffer(source).context(|| name.to_owned())?)
        }
        Compression::Xz => {
            let flags = liblzma::stream::CONCATENATED;
            let stream = liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY_BYTES, flags)
                .map_err(std::io::Error::from)
                .context(|| name.to_owned())?;
            Box::new(liblzma::bufread::XzDecoder::new_stream(source, stream))
        }
    };
    let mut spool = create(options)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut total: u64 = 0;
    loop {
        options.cancel.check()?;
        let length = match reader.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => {
                let text = format!("{name}: broken compressed data after {total} bytes");
                return Err(Error::corrupt(text).with_source(error));
            }
        };
        total += length as u64;
        if total > options.max_unpacked_bytes {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "{name} unpacks to more than the limit of {} bytes",
                    options.max_unpacked_bytes
                ),
            ));
        }
        spool.write_all(&buffer[..length]).context(|| spool_text(options))?;
        progress.advance(0, length as u64);
    }
    spool.seek(SeekFrom::Start(0)).context(|| spool_text(options))?;
    Ok(spool)
}

/// An empty file without a name.
pub(crate) fn create(options: &BuildOptions) -> Result<File> {
    tempfile::tempfile_in(&options.spool_dir).context(|| spool_text(options))
}

fn spool_text(options: &BuildOptions) -> String {
    format!("spool file in {}", path::show(options.spool_dir.as_os_str().as_bytes()))
}

/// Reads gzip members one after the other, and forgives what stands behind the last one.
struct Gunzip<R: BufRead> {
    member: Option<flate2::bufread::GzDecoder<R>>,
}

impl<R: BufRead> Gunzip<R> {
    fn new(source: R) -> Self {
        Self { member: Some(flate2::bufread::GzDecoder::new(source)) }
    }

    /// Whether another member follows. Zeros between members are padding; anything else behind a
    /// complete member is not ours, as for gzip itself.
    fn another(source: &mut R) -> std::io::Result<bool> {
        loop {
            let buffer = source.fill_buf()?;
            if buffer.is_empty() {
                return Ok(false);
            }
            let zeros = buffer.iter().take_while(|&&byte| byte == 0).count();
            if zeros == 0 {
                return Ok(buffer[0] == 0x1f);
            }
            source.consume(zeros);
        }
    }
}

impl<R: BufRead> Read for Gunzip<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        while let Some(member) = &mut self.member {
            let length = member.read(buffer)?;
            if length > 0 || buffer.is_empty() {
                return Ok(length);
            }
            if let Some(done) = self.member.take() {
                let mut source = done.into_inner();
                if Self::another(&mut source)? {
                    self.member = Some(flate2::bufread::GzDecoder::new(source));
                }
            }
        }
        Ok(0)
    }
}
