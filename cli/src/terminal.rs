//! The user's terminal while a command in a sandbox uses it: raw mode, size, standard input.
//!
//! Raw mode is undone when its guard is dropped, so on every way out but SIGKILL; signals that end this
//! process are taken by the command loop, which then returns.

use layer::{Error, Result};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{self, IsTerminal, Read};
use tokio::sync::mpsc;

/// Bytes of standard input in one message.
const CHUNK_BYTES: usize = 32 << 10;
/// Messages of standard input that wait for the sandbox.
const CHUNKS: usize = 4;

/// Raw mode, until it is dropped.
pub struct RawMode {
    before: Termios,
}

impl RawMode {
    /// Puts the terminal on standard input into raw mode. `Invalid` when there is none.
    pub fn enter() -> Result<Self> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Err(Error::invalid("standard input is no terminal; leave out -t"));
        }
        let name = "set the terminal to raw mode";
        let before = tcgetattr(&stdin).map_err(|error| Error::io(name, error.into()))?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw)
            .map_err(|error| Error::io(name, error.into()))?;
        Ok(Self { before })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        _ = tcsetattr(io::stdin(), OptionalActions::Drain, &self.before);
    }
}

/// Rows and columns of the terminal; 24 by 80 where there is none.
pub fn size() -> (u32, u32) {
    match tcgetwinsize(io::stdin()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => {
            (u32::from(size.ws_row), u32::from(size.ws_col))
        }
        _ => (24, 80),
    }
}

/// Standard input in pieces; the channel closes at its end. The thread behind it may stay blocked in
/// read(2) and ends with the process.
pub fn standard_input() -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(CHUNKS);
    std::thread::spawn(move || {
        let mut stdin = io::stdin().lock();
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => {
                    if sender.blocking_send(buffer[..count].to_vec()).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    });
    receiver
}
