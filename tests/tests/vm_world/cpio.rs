//! Just enough of the `newc` archive format for an initramfs.

/// An archive that grows.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    pub fn folder(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    pub fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entry(name, 0o100_000 | mode, content);
    }

    /// The whole archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let (number, size, name_bytes) = (self.entries, content.len(), name.len() + 1);
        // Magic, inode, mode, owner, group, links, time, size, device and its device, name, checksum.
        self.bytes.extend_from_slice(
            format!(
                "070701{number:08X}{mode:08X}{0:08X}{0:08X}{1:08X}{0:08X}{size:08X}{0:08X}{0:08X}\
                 {0:08X}{0:08X}{name_bytes:08X}{0:08X}",
                0, 1
            )
            .as_bytes(),
        );
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}
