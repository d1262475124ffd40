//! The living children of the zygote, what is held of them, and the notes of how they ended.
//!
//! Held are the pipes and terminals that commands print into: a runtime that starts after this one's has
//! died takes them from this process (`pidfd_getfd(2)`) and reads on, also what was printed by a command
//! that has ended meanwhile. A child inherits them for the moment until it gives up what is ours.

use proto::exits::Exit as Note;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use sys::process::{self, Exit, Pid};

/// The children.
pub struct Children {
    /// The kernel's number for each that lives.
    living: HashMap<Pid, u64>,
    held: HashMap<Pid, Vec<OwnedFd>>,
    notes: File,
    /// Notes ever written.
    noted: u64,
}

impl Children {
    /// None yet. `notes`: the file of ends.
    pub fn new(notes: File) -> Self {
        Self { living: HashMap::new(), held: HashMap::new(), notes, noted: 0 }
    }

    /// Whether none lives.
    pub fn is_empty(&self) -> bool {
        self.living.is_empty()
    }

    /// A new child, and what is to be held of it.
    pub fn born(&mut self, pid: Pid, pidfd: &OwnedFd, held: Vec<OwnedFd>) {
        // What was held of an ended one with this pid is not asked for any more.
        self.held.remove(&pid);
        self.living.insert(pid, process::pidfd_number(pidfd.as_fd()).unwrap_or(0));
        if !held.is_empty() {
            self.held.insert(pid, held);
        }
    }

    /// Holds one more descriptor of a child, also of one that has just ended.
    pub fn hold(&mut self, pid: Pid, descriptor: OwnedFd) {
        self.held.entry(pid).or_default().push(descriptor);
    }

    /// Lets go of what is held of a child, unless its pid is that of a later one by now.
    pub fn release(&mut self, pid: Pid, number: u64) {
        if self.living.get(&pid).is_none_or(|living| *living == number) {
            self.held.remove(&pid);
        }
    }

    /// Notes the end of a child.
    pub fn ended(&mut self, pid: Pid, exit: Exit) {
        let Some(number) = self.living.remove(&pid) else { return };
        let (value, is_signal) = match exit {
            Exit::Code(code) => (code, false),
            Exit::Signal(signal) => (signal, true),
        };
        let note = Note { number, value, is_signal };
        // A note that cannot be written matters only if the runtime dies now; the end is then `lost`.
        let _on_a_full_disk = self.notes.write_all_at(&note.encode(), Note::offset(self.noted));
        self.noted += 1;
    }
}
