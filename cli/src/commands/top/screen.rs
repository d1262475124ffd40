//! The terminal's second screen, for a table that is drawn again and again.

use crate::errors::Outcome;
use crate::output::write_out;
use rustix::termios::tcgetwinsize;
use std::io;

/// Enters the second screen and hides the cursor.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[2J";
/// Both back.
const LEAVE: &[u8] = b"\x1b[?25h\x1b[?1049l";

/// The second screen, until this is dropped.
#[derive(Debug)]
pub struct Screen(());

impl Screen {
    /// Shows it.
    pub fn enter() -> Outcome<Self> {
        write_out(ENTER)?;
        Ok(Self(()))
    }

    /// Draws lines from the top; `lines` is given the rows and columns that there are now.
    pub fn draw(&self, lines: impl FnOnce(usize, usize) -> String) -> Outcome {
        let (rows, columns) = size();
        let mut frame = String::from("\x1b[H");
        for (number, line) in lines(rows, columns).lines().take(rows).enumerate() {
            if number > 0 {
                frame.push_str("\r\n");
            }
            frame.push_str(line);
            // What was longer before.
            frame.push_str("\x1b[K");
        }
        frame.push_str("\x1b[J");
        write_out(frame.as_bytes())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        _ = write_out(LEAVE);
    }
}

/// Rows and columns of standard output.
fn size() -> (usize, usize) {
    match tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => {
            (usize::from(size.ws_row), usize::from(size.ws_col))
        }
        _ => (24, 80),
    }
}
