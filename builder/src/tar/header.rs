//! One 512-byte header block: fields, checksum, numbers.

use super::BLOCK;

/// A header block whose checksum is right.
#[derive(Clone)]
pub(super) struct Header {
    block: [u8; BLOCK as usize],
}

/// What a header block is.
pub(super) enum Block {
    /// All zero: the end, or half of it.
    Zero,
    /// A header.
    Header(Box<Header>),
    /// Neither.
    Broken,
}

impl Header {
    /// Classifies a block.
    pub(super) fn parse(block: [u8; BLOCK as usize]) -> Block {
        if block.iter().all(|&byte| byte == 0) {
            return Block::Zero;
        }
        let Some(stated) = number(&block[148..156]) else { return Block::Broken };
        let field = 148..156;
        let byte = |(at, &byte): (usize, &u8)| if field.contains(&at) { b' ' } else { byte };
        let unsigned: i64 = block.iter().enumerate().map(|pair| i64::from(byte(pair))).sum();
        // Some old programs added signed characters.
        let signed: i64 =
            block.iter().enumerate().map(|pair| i64::from(byte(pair).cast_signed())).sum();
        if stated == unsigned || stated == signed {
            Block::Header(Box::new(Self { block }))
        } else {
            Block::Broken
        }
    }

    pub(super) fn kind(&self) -> u8 {
        self.block[156]
    }

    fn is_ustar(&self) -> bool {
        &self.block[257..263] == b"ustar\0"
    }

    /// The name with the prefix that ustar and star keep apart.
    pub(super) fn name(&self) -> Vec<u8> {
        let name = text(&self.block[..100]);
        if !self.is_ustar() {
            return name.to_vec();
        }
        let star = &self.block[508..512] == b"tar\0";
        let prefix = text(&self.block[345..if star { 476 } else { 500 }]);
        if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
    }

    pub(super) fn link_name(&self) -> Vec<u8> {
        text(&self.block[157..257]).to_vec()
    }

    pub(super) fn mode(&self) -> Option<i64> {
        number(&self.block[100..108])
    }

    pub(super) fn uid(&self) -> Option<i64> {
        number(&self.block[108..116])
    }

    pub(super) fn gid(&self) -> Option<i64> {
        number(&self.block[116..124])
    }

    pub(super) fn size(&self) -> Option<i64> {
        number(&self.block[124..136])
    }

    pub(super) fn mtime(&self) -> Option<i64> {
        number(&self.block[136..148])
    }

    pub(super) fn major(&self) -> Option<i64> {
        number(&self.block[329..337])
    }

    pub(super) fn minor(&self) -> Option<i64> {
        number(&self.block[337..345])
    }

    /// The map entries of an old GNU sparse header, and whether more blocks of them follow.
    pub(super) fn sparse(&self) -> (&[u8], bool) {
        (&self.block[386..482], self.block[482] != 0)
    }

    /// The true size that an old GNU sparse header states.
    pub(super) fn sparse_size(&self) -> Option<i64> {
        number(&self.block[483..495])
    }
}

/// Up to the first NUL.
pub(super) fn text(field: &[u8]) -> &[u8] {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    &field[..end]
}

/// An octal or base-256 number; an empty field is 0, nonsense is `None`.
pub(super) fn number(field: &[u8]) -> Option<i64> {
    if field.first()? & 0x80 != 0 { base256(field) } else { octal(field) }
}

/// Two's complement of the field's bits without the topmost, which marks it.
fn base256(field: &[u8]) -> Option<i64> {
    let negative = field[0] & 0x40 != 0;
    let first = if negative { field[0] | 0x80 } else { field[0] & 0x7f };
    let mut value = i128::from(first.cast_signed());
    for &byte in &field[1..] {
        value = value.checked_mul(256)? + i128::from(byte);
        if value.unsigned_abs() > 1 << 100 {
            return None;
        }
    }
    i64::try_from(value).ok()
}

fn octal(field: &[u8]) -> Option<i64> {
    let digits = text(field).trim_ascii();
    let mut value: i64 = 0;
    for &digit in digits {
        if !(b'0'..=b'7').contains(&digit) {
            return None;
        }
        value = value.checked_mul(8)?.checked_add(i64::from(digit - b'0'))?;
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_all_kinds() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"   644 \0"), Some(0o644));
        assert_eq!(number(b"\0\0\0\0"), Some(0));
        assert_eq!(number(b"12x\0"), None);
        assert_eq!(number(b"\x80\0\0\0\xff\xff\xff\xfe"), Some(0xffff_fffe));
        assert_eq!(number(&[0xff; 12]), Some(-1));
        assert_eq!(number(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x80\x00"), Some(-32768));
        let huge = [0x80, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(number(&huge), None);
    }
}
