//! How the tar of a layer was compressed, so that the same compressed bytes can be made of it again; or
//! those bytes themselves, where nothing shorter gives them.
//!
//! ```text
//! bytes
//!   8   magic "LAMSTREM"
//!   4   version 1
//!   1   how the blob is compressed: 1 gzip, 2 zstd
//!   1   what follows: 0 the blob, 1 records
//!   2   zero
//!   8   length of the blob
//!       the blob, or one zstd frame with a checksum, holding records:
//!         0                                        the end
//!         1, varint count, bytes                   bytes of the blob: gzip's headers and trailers
//!         2                                        a deflate stream begins
//!         3, varint plain, varint count, bytes     the next `plain` bytes of the tar, and what the library
//!                                                  needs to know of their deflate blocks
//! ```
//! gzip streams are taken apart by preflate, which predicts what a compressor would have written and notes
//! the differences. Compressors unlike zlib leave many; then the blob is kept, as zstd's is.

use super::framing::{get_varint, put_varint};
use crate::options::BuildOptions;
use crate::source::blob::{Hashing, Region};
use crate::source::spool::{self, Compression};
use layer::{Context, Error, ErrorKind, Result};
use preflate_rs::{ExitCode, PreflateConfig, PreflateStreamProcessor, RecreateStreamProcessor};
use std::fs::File;
use std::io::{BufReader, Cursor, Read, Seek, SeekFrom, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

const MAGIC: &[u8; 8] = b"LAMSTREM";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 24;
/// The level of the frame; what is in it is compressed already.
const LEVEL: i32 = 1;
/// Compressed bytes that are looked at together.
const WINDOW_BYTES: usize = 1 << 20;
/// One deflate block of more compressed bytes is not taken apart.
const MAX_WINDOW_BYTES: usize = 16 << 20;
/// Plain bytes that are held at once.
const MAX_PLAIN_BYTES: usize = 32 << 20;
/// What one record of a damaged or forged object may claim.
const MAX_RECORD_BYTES: u64 = 64 << 20;
/// The library counts positions in 31 bits.
const MAX_TAR_BYTES: u64 = 1 << 30;
/// Notes worth more than this share of the blob are not worth the work of an export.
const WORTHWHILE: u64 = 2;

/// What stands at the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// How the blob is compressed.
    pub compression: Compression,
    /// Whether records follow, not the blob.
    pub records: bool,
    /// Length of the blob.
    pub blob_bytes: u64,
}

impl Header {
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12] = if self.compression == Compression::Gzip { 1 } else { 2 };
        bytes[13] = u8::from(self.records);
        bytes[16..].copy_from_slice(&self.blob_bytes.to_le_bytes());
        bytes
    }

    /// Reads the beginning.
    pub(crate) fn decode(source: &mut impl Read) -> Result<Self> {
        let mut bytes = [0; HEADER_BYTES];
        source.read_exact(&mut bytes).context(|| "compression of a layer".to_owned())?;
        if bytes[..8] != *MAGIC {
            return Err(Error::corrupt("no compression of a layer"));
        }
        let version = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
        let compression = match bytes[12] {
            1 => Compression::Gzip,
            2 => Compression::Zstd,
            _ => Compression::None,
        };
        if version != VERSION || compression == Compression::None || bytes[13] > 1 {
            let text = format!("compression of a layer of version {version}");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let mut number = [0; 8];
        number.copy_from_slice(&bytes[16..]);
        let blob_bytes = u64::from_le_bytes(number);
        Ok(Self { compression, records: bytes[13] == 1, blob_bytes })
    }
}

/// Writes how `blob` is compressed; its digest is compared on the way. True when records did.
pub(crate) fn write(
    blob: &Region,
    digest: &str,
    compression: Compression,
    tar_bytes: u64,
    options: &BuildOptions,
    mut out: impl Write,
) -> Result<bool> {
    let failed = || format!("keep the compression of {}", blob.name);
    let notes = match compression {
        Compression::Gzip if tar_bytes <= MAX_TAR_BYTES => take_apart(blob, digest, options)?,
        _ => None,
    };
    let header = Header { compression, records: notes.is_some(), blob_bytes: blob.length };
    out.write_all(&header.encode()).context(failed)?;
    match notes {
        Some(mut notes) => std::io::copy(&mut notes, &mut out).context(failed).map(|_| ())?,
        None => {
            let mut hashing = Hashing::new(blob.reader(), digest)?;
            std::io::copy(&mut hashing, &mut out).context(failed)?;
            hashing.finish(&blob.name)?;
        }
    }
    out.flush().context(failed)?;
    Ok(header.records)
}

/// The records of a gzip file; nothing when they would be no shorter than it, or cannot be made.
fn take_apart(blob: &Region, digest: &str, options: &BuildOptions) -> Result<Option<File>> {
    let mut notes = spool::create(options)?;
    let mut hashing = Hashing::new(blob.reader(), digest)?;
    // The library reads what strangers wrote; where it meets what it did not expect, it gives up.
    let taken = catch_unwind(AssertUnwindSafe(|| {
        Gzip { source: Window::new(&mut hashing), blob_bytes: blob.length, noted: 0 }
            .records(&mut notes, options)
    }));
    match taken {
        Ok(Ok(true)) => {}
        Ok(Ok(false)) => return Ok(None),
        Ok(Err(error)) => {
            options.cancel.check()?;
            tracing::debug!("{} is kept as it is: {}", blob.name, error.chain());
            return Ok(None);
        }
        Err(_) => return Ok(None),
    }
    hashing.finish(&blob.name)?;
    notes.seek(SeekFrom::Start(0)).context(|| "spool file".to_owned())?;
    Ok(Some(notes))
}

/// Compressed bytes that are looked at and then passed.
struct Window<R> {
    source: R,
    bytes: Vec<u8>,
    ended: bool,
}

impl<R: Read> Window<R> {
    fn new(source: R) -> Self {
        Self { source, bytes: Vec::new(), ended: false }
    }

    /// Holds at least so many bytes, where there are so many.
    fn fill(&mut self, count: usize) -> std::io::Result<&[u8]> {
        if !self.ended && self.bytes.len() < count {
            let missing = (count - self.bytes.len()) as u64;
            let read = self.source.by_ref().take(missing).read_to_end(&mut self.bytes)?;
            self.ended = (read as u64) < missing;
        }
        Ok(&self.bytes)
    }

    fn pass(&mut self, count: usize) {
        self.bytes.drain(..count);
    }
}

/// A gzip file on its way into records.
struct Gzip<R> {
    source: Window<R>,
    blob_bytes: u64,
    noted: u64,
}

impl<R: Read> Gzip<R> {
    /// False when the records would not be worth it.
    fn records(&mut self, notes: &mut File, options: &BuildOptions) -> Result<bool> {
        let failed = || "take a gzip file apart".to_owned();
        let mut frame = zstd::stream::write::Encoder::new(notes, LEVEL).context(failed)?;
        frame.include_checksum(true).context(failed)?;
        while self.source.fill(WINDOW_BYTES).context(failed)?.first() == Some(&0x1f) {
            let Some(length) = header_bytes(&self.source.bytes) else { break };
            self.literal(length, &mut frame).context(failed)?;
            if !self.deflate(&mut frame, options)? {
                return Ok(false);
            }
            // CRC and length; a file that ends inside them is what unpacking has refused.
            let trailer = self.source.fill(WINDOW_BYTES).context(failed)?.len().min(8);
            self.literal(trailer, &mut frame).context(failed)?;
        }
        // What stands behind the last member.
        loop {
            let rest = self.source.fill(WINDOW_BYTES).context(failed)?.len();
            if rest == 0 {
                break;
            }
            self.literal(rest, &mut frame).context(failed)?;
        }
        frame.write_all(&[0]).context(failed)?;
        frame.finish().context(failed)?;
        Ok(self.is_worthwhile())
    }

    fn is_worthwhile(&self) -> bool {
        self.noted < self.blob_bytes.max(1024) / WORTHWHILE
    }

    fn literal(&mut self, count: usize, out: &mut impl Write) -> std::io::Result<()> {
        if count > 0 {
            out.write_all(&[1])?;
            put_varint(out, count as u64)?;
            out.write_all(&self.source.bytes[..count])?;
            self.noted += count as u64;
            self.source.pass(count);
        }
        Ok(())
    }

    /// One deflate stream, in pieces of whole blocks.
    fn deflate(&mut self, out: &mut impl Write, options: &BuildOptions) -> Result<bool> {
        let failed = || "take a gzip file apart".to_owned();
        let mut processor = PreflateStreamProcessor::new(&PreflateConfig {
            plain_text_limit: MAX_PLAIN_BYTES,
            ..PreflateConfig::default()
        });
        out.write_all(&[2]).context(failed)?;
        let mut window = WINDOW_BYTES;
        while !processor.is_done() {
            options.cancel.check()?;
            let bytes = self.source.fill(window).context(failed)?;
            let piece = match processor.decompress(&bytes[..bytes.len().min(window)]) {
                Ok(piece) if piece.compressed_size > 0 || processor.is_done() => piece,
                Err(error) if error.exit_code() != ExitCode::ShortRead => {
                    let text = format!("this compressor is not understood: {}", error.message());
                    return Err(Error::new(ErrorKind::Unsupported, text));
                }
                _ if self.source.ended || window >= MAX_WINDOW_BYTES => {
                    return Err(Error::new(ErrorKind::Unsupported, "a very large deflate block"));
                }
                _ => {
                    window *= 4;
                    continue;
                }
            };
            let plain = processor.plain_text().len() as u64;
            out.write_all(&[3]).context(failed)?;
            put_varint(out, plain).context(failed)?;
            put_varint(out, piece.corrections.len() as u64).context(failed)?;
            out.write_all(&piece.corrections).context(failed)?;
            self.noted += piece.corrections.len() as u64;
            self.source.pass(piece.compressed_size);
            processor.shrink_to_dictionary();
            window = WINDOW_BYTES;
            if !self.is_worthwhile() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The length of a gzip member's header (RFC 1952, section 2.3), when it is all there.
fn header_bytes(bytes: &[u8]) -> Option<usize> {
    let flags = *bytes.get(3)?;
    if bytes[..3] != [0x1f, 0x8b, 8] {
        return None;
    }
    let mut at: usize = 10;
    if flags & 4 != 0 {
        let length = u16::from_le_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]);
        at += 2 + usize::from(length);
    }
    for flag in [8, 16] {
        if flags & flag != 0 {
            at += bytes.get(at..)?.iter().position(|&byte| byte == 0)? + 1;
        }
    }
    if flags & 2 != 0 {
        at += 2;
    }
    (at <= bytes.len()).then_some(at)
}

/// Makes the blob again out of what [`write`] wrote, behind its header, and the tar. Whoever takes the bytes
/// compares them with the blob's digest.
pub(crate) fn rebuild(
    header: &Header,
    mut source: impl Read,
    tar: &mut impl Read,
    out: &mut impl Write,
) -> Result<()> {
    let failed = || "make a layer's blob again".to_owned();
    if !header.records {
        std::io::copy(&mut source, out).context(failed)?;
        return Ok(());
    }
    let frame = zstd::stream::read::Decoder::new(source).context(failed)?;
    let mut records = BufReader::new(frame);
    let mut deflate = RecreateStreamProcessor::new();
    loop {
        let mut tag = [0];
        records.read_exact(&mut tag).context(failed)?;
        match tag[0] {
            0 => return Ok(()),
            1 => {
                let count = get_varint(&mut records).context(failed)?;
                let copied = std::io::copy(&mut records.by_ref().take(count), out);
                if copied.context(failed)? != count {
                    return Err(Error::corrupt("the compression of a layer is cut off"));
                }
            }
            2 => deflate = RecreateStreamProcessor::new(),
            3 => {
                let plain = get_varint(&mut records).context(failed)?;
                let count = get_varint(&mut records).context(failed)?;
                if plain.max(count) > MAX_RECORD_BYTES {
                    return Err(Error::corrupt("the compression of a layer is damaged"));
                }
                let corrections = exactly(&mut records, count).context(failed)?;
                let plain = exactly(tar, plain).context(failed)?;
                out.write_all(&recompress(&mut deflate, &plain, &corrections)?).context(failed)?;
            }
            _ => return Err(Error::corrupt("the compression of a layer is damaged")),
        }
    }
}

fn exactly(source: &mut impl Read, count: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(count).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == count {
        Ok(bytes)
    } else {
        Err(std::io::ErrorKind::UnexpectedEof.into())
    }
}

fn recompress(
    deflate: &mut RecreateStreamProcessor,
    plain: &[u8],
    corrections: &[u8],
) -> Result<Vec<u8>> {
    let done =
        catch_unwind(AssertUnwindSafe(|| deflate.recompress(&mut Cursor::new(plain), corrections)));
    match done {
        Ok(Ok((bytes, _))) => Ok(bytes),
        Ok(Err(error)) => {
            let text = format!("the compression of a layer is damaged: {}", error.message());
            Err(Error::corrupt(text))
        }
        Err(_) => Err(Error::corrupt("the compression of a layer is damaged")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BuildOptions;
    use layer::manifest::LayerKind;
    use sha2::Digest as _;
    use std::os::unix::fs::FileExt;

    fn text(bytes: usize) -> Vec<u8> {
        let mut state: u64 = 7;
        let mut text = Vec::with_capacity(bytes + 16);
        while text.len() < bytes {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
            let word =
                ["alpha ", "beta\n", "gamma, ", "delta. ", "\0\0\0\0"][(state >> 33) as usize % 5];
            text.extend_from_slice(word.as_bytes());
            if (state >> 40).is_multiple_of(50) {
                text.extend_from_slice(&state.to_le_bytes());
            }
        }
        text.truncate(bytes);
        text
    }

    fn keep(blob: &[u8], tar_bytes: usize) -> (bool, Vec<u8>) {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(blob, 0).unwrap();
        let region = Region::whole(file, "blob".to_owned()).unwrap();
        let digest = crate::source::blob::hex("sha256:", &sha2::Sha256::digest(blob));
        let options = BuildOptions::new(LayerKind::Base);
        let mut kept = Vec::new();
        let compression = Compression::detect(&blob[..8.min(blob.len())]).unwrap();
        let records =
            write(&region, &digest, compression, tar_bytes as u64, &options, &mut kept).unwrap();
        (records, kept)
    }

    fn again(mut kept: &[u8], tar: &[u8]) -> Result<Vec<u8>> {
        let header = Header::decode(&mut kept)?;
        let mut blob = Vec::new();
        rebuild(&header, kept, &mut &*tar, &mut blob)?;
        Ok(blob)
    }

    fn gzip(tar: &[u8], level: u32) -> Vec<u8> {
        let mut encoder = flate2::GzBuilder::new()
            .filename("a name")
            .comment("a remark")
            .extra(vec![1, 2, 3])
            .write(Vec::new(), flate2::Compression::new(level));
        encoder.write_all(tar).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn gzip_of_every_level_comes_back() {
        let tar = text(3_000_000);
        for level in [0, 1, 6, 9] {
            let blob = gzip(&tar, level);
            let (records, kept) = keep(&blob, tar.len());
            assert!(again(&kept, &tar).unwrap() == blob, "level {level}");
            eprintln!("level {level}: blob {}, kept {}, {records}", blob.len(), kept.len());
            assert!(kept.len() <= blob.len() + HEADER_BYTES);
        }
    }

    #[test]
    fn several_members_and_what_stands_behind_them_come_back() {
        let tar = text(300_000);
        let mut blob = gzip(&tar[..100_000], 9);
        blob.extend(gzip(&tar[100_000..], 1));
        blob.extend([0; 700]);
        let (_, kept) = keep(&blob, tar.len());
        assert!(again(&kept, &tar).unwrap() == blob);
        let empty = gzip(b"", 9);
        let (_, kept) = keep(&empty, 0);
        assert!(again(&kept, b"").unwrap() == empty);
    }

    #[test]
    fn zstd_is_kept_as_it_is() {
        let tar = text(100_000);
        let blob = zstd::bulk::compress(&tar, 3).unwrap();
        let (records, kept) = keep(&blob, tar.len());
        assert!(!records);
        assert!(again(&kept, &tar).unwrap() == blob);
    }

    #[test]
    fn a_blob_that_is_not_its_digest_is_not_kept() {
        let file = tempfile::tempfile().unwrap();
        let blob = gzip(&text(100_000), 6);
        file.write_all_at(&blob, 0).unwrap();
        let region = Region::whole(file, "blob".to_owned()).unwrap();
        let digest = format!("sha256:{}", "0".repeat(64));
        let options = BuildOptions::new(LayerKind::Base);
        let error = write(&region, &digest, Compression::Gzip, 100_000, &options, Vec::new());
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn damage_is_an_error_or_other_bytes_and_never_a_panic() {
        let tar = text(200_000);
        let blob = gzip(&tar, 6);
        let (_, kept) = keep(&blob, tar.len());
        for at in (0..kept.len()).step_by(kept.len() / 60 + 1) {
            let mut bad = kept.clone();
            bad[at] ^= 0x55;
            let _ = again(&bad, &tar);
            let _ = again(&kept[..at], &tar);
        }
        // A tar that is another one.
        assert!(again(&kept, &tar[1..]).map_or(true, |found| found != blob));
    }
}
