//! The S3 server of tests, run by Python from the place where `cargo xtask setup` installs it. It ends with
//! the test process.

#![allow(dead_code)] // Each suite uses a part of it.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

use super::folder::in_folder;

/// Where set-up installs moto.
const PYTHON: &str = "/var/cache/lamella/s3-server/bin/python";
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../store/tests/places/s3_server.py");
const CREDENTIALS: &str =
    "[default]\naws_access_key_id = testing\naws_secret_access_key = testing\n";

/// A server with one bucket.
pub struct Server {
    child: Child,
    port: u16,
    pipes: Mutex<(Option<ChildStdin>, BufReader<ChildStdout>)>,
    next: AtomicU32,
}

impl Server {
    /// One of its own.
    pub fn start() -> Self {
        assert!(Path::new(PYTHON).exists(), "{PYTHON} is missing: run `cargo xtask setup`");
        let mut child = Command::new(PYTHON)
            .arg(SCRIPT)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut port = String::new();
        output.read_line(&mut port).unwrap();
        let port = port.trim().parse().unwrap();
        let pipes = Mutex::new((input, output));
        let server = Self { child, port, pipes, next: AtomicU32::new(0) };
        server.make_bucket();
        server
    }

    /// The one that all tests of this process share.
    pub fn shared() -> &'static Self {
        static SERVER: OnceLock<Server> = OnceLock::new();
        SERVER.get_or_init(Self::start)
    }

    fn make_bucket(&self) {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).unwrap();
        let request = "PUT /test HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        let mut status = String::new();
        BufReader::new(stream).read_line(&mut status).unwrap();
        assert!(status.contains(" 200 "), "{status}");
    }

    /// What follows the question mark of a URL.
    pub fn parameters(&self) -> String {
        format!(
            "endpoint=http://127.0.0.1:{}&region=us-east-1&credentials={}",
            self.port,
            in_folder("credentials", |path| std::fs::write(path, CREDENTIALS).unwrap()).display()
        )
    }

    /// A place in the bucket that nobody else has.
    pub fn url(&self) -> String {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        format!("s3://test/store-{number}/inner?{}", self.parameters())
    }

    /// Gives the server a command (see its script) and returns what it says.
    pub fn tell(&self, command: &str) -> String {
        let mut pipes = self.pipes.lock().unwrap();
        writeln!(pipes.0.as_mut().unwrap(), "{command}").unwrap();
        let mut answer = String::new();
        pipes.1.read_line(&mut answer).unwrap();
        answer.trim().to_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
