//! Writes tar files byte by byte, also such that no tar program would write.
#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::needless_pass_by_value
)]

/// A tar file in the making.
#[derive(Debug, Default, Clone)]
pub struct Tape(pub Vec<u8>);

/// The fields of a header.
#[derive(Debug, Clone)]
pub struct Fields {
    pub name: Vec<u8>,
    pub kind: u8,
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    pub mtime: i64,
    pub size: Option<u64>,
    pub link: Vec<u8>,
    pub rdev: (u32, u32),
    pub gnu: bool,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            name: Vec::new(),
            kind: b'0',
            mode: 0o644,
            uid: 0,
            gid: 0,
            mtime: 1_000_000_000,
            size: None,
            link: Vec::new(),
            rdev: (0, 0),
            gnu: false,
        }
    }
}

impl Tape {
    /// Appends one header and its data.
    pub fn raw(mut self, fields: Fields, data: &[u8]) -> Self {
        let mut block = [0_u8; 512];
        fill(&mut block, &fields, data.len() as u64);
        seal(&mut block);
        self.0.extend_from_slice(&block);
        self.data(data)
    }

    pub fn data(mut self, data: &[u8]) -> Self {
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub fn file(self, name: &str, data: &[u8]) -> Self {
        self.raw(Fields { name: name.into(), ..Fields::default() }, data)
    }

    pub fn directory(self, name: &str, mode: u32) -> Self {
        self.raw(Fields { name: name.into(), kind: b'5', mode, ..Fields::default() }, b"")
    }

    pub fn symlink(self, name: &str, target: &str) -> Self {
        let link = target.into();
        self.raw(Fields { name: name.into(), kind: b'2', link, ..Fields::default() }, b"")
    }

    pub fn hard_link(self, name: &str, target: &str) -> Self {
        let link = target.into();
        self.raw(Fields { name: name.into(), kind: b'1', link, ..Fields::default() }, b"")
    }

    pub fn device(self, name: &str, kind: u8, rdev: (u32, u32)) -> Self {
        self.raw(Fields { name: name.into(), kind, rdev, ..Fields::default() }, b"")
    }

    /// Appends a PAX header for the next entry.
    pub fn pax(self, records: &[(&str, &[u8])]) -> Self {
        self.extended(b'x', records)
    }

    pub fn extended(self, kind: u8, records: &[(&str, &[u8])]) -> Self {
        let data: Vec<u8> = records.iter().flat_map(|(key, value)| record(key, value)).collect();
        self.raw(Fields { name: b"pax".to_vec(), kind, ..Fields::default() }, &data)
    }

    /// Appends the end mark.
    pub fn end(mut self) -> Vec<u8> {
        self.0.extend_from_slice(&[0; 1024]);
        self.0
    }
}

fn fill(block: &mut [u8; 512], fields: &Fields, data: u64) {
    block[..fields.name.len()].copy_from_slice(&fields.name);
    octal(&mut block[100..108], u64::from(fields.mode));
    octal(&mut block[108..116], fields.uid);
    octal(&mut block[116..124], fields.gid);
    octal(&mut block[124..136], fields.size.unwrap_or(data));
    match u64::try_from(fields.mtime) {
        Ok(mtime) => octal(&mut block[136..148], mtime),
        Err(_) => {
            block[136..140].fill(0xff);
            block[140..148].copy_from_slice(&fields.mtime.to_be_bytes());
        }
    }
    block[156] = fields.kind;
    block[157..157 + fields.link.len()].copy_from_slice(&fields.link);
    block[257..265].copy_from_slice(if fields.gnu { b"ustar  \0" } else { b"ustar\x0000" });
    octal(&mut block[329..337], u64::from(fields.rdev.0));
    octal(&mut block[337..345], u64::from(fields.rdev.1));
}

/// Puts the checksum in.
pub fn seal(block: &mut [u8]) {
    block[148..156].fill(b' ');
    let sum: u64 = block[..512].iter().map(|&byte| u64::from(byte)).sum();
    octal(&mut block[148..156], sum);
}

/// Octal with a NUL, or base-256 where that does not fit.
pub fn octal(field: &mut [u8], value: u64) {
    let digits = field.len() - 1;
    let text = format!("{value:0digits$o}\0");
    if text.len() == field.len() {
        field.copy_from_slice(text.as_bytes());
    } else {
        let at = field.len() - 8;
        field.fill(0);
        field[at..].copy_from_slice(&value.to_be_bytes());
        field[0] |= 0x80;
    }
}

/// One PAX record.
pub fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let body = key.len() + value.len() + 3;
    let mut length = body + 1;
    while body + length.to_string().len() != length {
        length = body + length.to_string().len();
    }
    let mut record = format!("{length} {key}=").into_bytes();
    record.extend_from_slice(value);
    record.push(b'\n');
    assert_eq!(record.len(), length);
    record
}
