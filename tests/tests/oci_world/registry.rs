//! Debian's `docker-registry` on a port of this machine, and skopeo to talk to it.
//!
//! Dropping it ends the process.
#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Name and password of registries that want one.
pub const CREDENTIALS: &str = "user:secret";
/// `htpasswd -nbB user secret`
const HTPASSWD: &str = "user:$2y$05$Js5qn.tFcSykJXl4B7xoNukO1s86pnrY7bee/s5Ab6BqwIzfPJtdS\n";

pub struct Registry {
    process: Child,
    pub host: String,
    /// Where it keeps everything.
    pub storage: PathBuf,
    locked: bool,
}

impl Registry {
    /// A registry that keeps its content below `dir`.
    pub fn start(dir: &Path, locked: bool) -> Self {
        // Whoever takes the port in between makes the registry end, and the next one is tried.
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            if let Some(registry) = Self::start_at(dir, locked, port) {
                return registry;
            }
        }
        panic!("docker-registry does not start");
    }

    fn start_at(dir: &Path, locked: bool, port: u16) -> Option<Self> {
        let (host, storage) = (format!("127.0.0.1:{port}"), dir.join("registry"));
        let (config, passwords) = (dir.join("registry.yml"), dir.join("htpasswd"));
        fs::create_dir_all(&storage).unwrap();
        fs::write(&passwords, HTPASSWD).unwrap();
        let mut text = format!(
            "version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '{host}'}}\n\
             storage: {{filesystem: {{rootdirectory: '{}'}}}}\n",
            storage.display()
        );
        if locked {
            let auth =
                format!("auth: {{htpasswd: {{realm: r, path: '{}'}}}}\n", passwords.display());
            text.push_str(&auth);
        }
        fs::write(&config, text).unwrap();
        let log = fs::File::create(dir.join("registry.log")).unwrap();
        let process = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("docker-registry is installed by `cargo xtask setup`");
        let mut registry = Self { process, host, storage, locked };
        let begin = Instant::now();
        while TcpStream::connect(&registry.host).is_err() {
            if registry.process.try_wait().unwrap().is_some() {
                return None;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "docker-registry does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(registry)
    }

    /// The name of an image here.
    pub fn image(&self, name: &str) -> String {
        format!("docker://{}/{name}", self.host)
    }

    /// Copies an image here, every byte as it is.
    pub fn push(&self, from: &str, name: &str) {
        let to = self.image(name);
        let mut arguments = vec!["copy", "-q", "--preserve-digests", "--dest-tls-verify=false"];
        if self.locked {
            arguments.extend(["--dest-creds", CREDENTIALS]);
        }
        arguments.extend([from, &to]);
        run("skopeo", &arguments);
    }

    /// The digest of an image here.
    pub fn digest(&self, name: &str) -> String {
        let image = self.image(name);
        let mut arguments = vec!["inspect", "--tls-verify=false", "--format", "{{.Digest}}"];
        if self.locked {
            arguments.extend(["--creds", CREDENTIALS]);
        }
        arguments.push(&image);
        run("skopeo", &arguments).trim().to_owned()
    }

    /// Loses every blob of layers; documents stay.
    pub fn lose_layers(&self, digests: &[String]) {
        for digest in digests {
            let hex = digest.strip_prefix("sha256:").unwrap();
            let blob = format!("docker/registry/v2/blobs/sha256/{}/{hex}/data", &hex[..2]);
            fs::remove_file(self.storage.join(blob)).unwrap();
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs a program that must succeed; answers what it printed.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let (text, said) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {said}{text}");
    text.into_owned()
}
