//! Checksums that inputs are given, so that what lies behind them is reached.

/// The bytes with the BLAKE3 digest that ends most of our files.
pub(crate) fn sealed(body: &[u8]) -> Vec<u8> {
    [body, blake3::hash(body).as_bytes()].concat()
}

/// The bytes without that digest: the form in which seeds are kept.
pub(crate) fn unsealed(mut file: Vec<u8>) -> Vec<u8> {
    file.truncate(file.len().saturating_sub(blake3::OUT_LEN));
    file
}

/// Gives every header of a tar file the sum that it should have.
pub(crate) fn tar_sums(bytes: &mut [u8]) {
    for block in bytes.chunks_exact_mut(512).filter(|block| &block[257..262] == b"ustar") {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    }
}

/// Gives a superblock of EROFS its checksum, where it says that it has one.
pub(crate) fn erofs_superblock(image: &mut [u8]) {
    let Some(block) = image.get_mut(1024..4096) else { return };
    if block[8] & 1 == 1 {
        block[4..8].fill(0);
        let crc = block.iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82F6_3B78 * (crc & 1)))
        });
        block[4..8].copy_from_slice(&crc.to_le_bytes());
    }
}
