//! A data directory of its own for each test, and the built program on it.
//!
//! Dropping a [`World`] ends its node and takes back its mounts, also when the test failed; the directory
//! goes last.

use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// What a command did.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Done {
    /// The command must have succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "stdout: {}\nstderr: {}", self.out, self.err);
        self
    }

    /// The command must have failed with this code and one line that says so.
    #[track_caller]
    pub fn fails(self, code: i32, says: &str) -> Self {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.out, self.err);
        let lines: Vec<&str> =
            self.err.lines().filter(|line| !line.contains("started a node")).collect();
        assert!(self.err.contains(says), "{says:?} is not in {:?}", self.err);
        if code == 1 {
            assert_eq!(lines.len(), 1, "one line, not {:?}", self.err);
        }
        self
    }

    /// The output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.out))
    }
}

/// A place of its own.
pub struct World {
    dir: TempDir,
}

impl World {
    pub fn new() -> Self {
        Self {
            dir: tempfile::Builder::new().prefix("lamella-cli-").tempdir_in("/var/tmp").unwrap(),
        }
    }

    /// A path below the world's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn data(&self) -> PathBuf {
        self.path("data")
    }

    /// The program on the data directory.
    pub fn command<S: AsRef<OsStr>>(&self, words: &[S]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lamella"));
        command.env_remove("LAMELLA_DATA").env_remove("LAMELLA_STORE");
        // Whatever the host is told, a test is not.
        command.env_remove("LAMELLA_REQUIRE_SIGNATURE").env("LAMELLA_CONFIG", "/dev/null");
        command.arg("--data").arg(self.data()).args(words).stdin(Stdio::null());
        command
    }

    /// Runs it to its end.
    pub fn run<S: AsRef<OsStr>>(&self, words: &[S]) -> Done {
        finish(self.command(words))
    }

    /// Runs a line of words without spaces in them.
    pub fn line(&self, line: &str) -> Done {
        self.run(&line.split(' ').collect::<Vec<_>>())
    }

    /// Starts it.
    pub fn spawn(&self, line: &str) -> Child {
        let words: Vec<&str> = line.split(' ').collect();
        self.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// A small tree with what trees hold.
    pub fn tree(&self, name: &str) -> PathBuf {
        let root = self.path(name);
        fs::create_dir_all(root.join("sub/deep")).unwrap();
        fs::write(root.join("hello"), "hello\n").unwrap();
        fs::write(root.join("sub/big"), noise(300_000, 1)).unwrap();
        fs::write(root.join("sub/deep/zeros"), vec![0; 100_000]).unwrap();
        std::os::unix::fs::symlink("hello", root.join("link")).unwrap();
        fs::hard_link(root.join("hello"), root.join("sub/again")).unwrap();
        root
    }

    /// A tree that adds `sub/new` to [`World::tree`].
    pub fn addition(&self, name: &str) -> PathBuf {
        let root = self.path(name);
        fs::create_dir_all(root.join("sub")).unwrap();
        fs::write(root.join("sub/new"), "new").unwrap();
        root
    }

    /// An empty directory.
    pub fn mount_point(&self) -> PathBuf {
        let dir = self.path("mnt");
        fs::create_dir(&dir).unwrap();
        dir
    }

    /// Builds a tree and names it.
    #[track_caller]
    pub fn build(&self, source: &Path, tag: &str) {
        self.run(&[OsStr::new("build"), source.as_os_str(), OsStr::new("-t"), OsStr::new(tag)])
            .ok();
    }

    /// The pid of the node, if one is running.
    pub fn node_pid(&self) -> Option<u32> {
        let text = fs::read_to_string(self.data().join("run/node.lock")).ok()?;
        let pid: u32 = text.lines().next()?.parse().ok()?;
        alive(pid).then_some(pid)
    }

    /// Processes that have this world's directory in their command line.
    pub fn processes(&self) -> Vec<u32> {
        let needle = self.dir.path().as_os_str().as_bytes();
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.windows(needle.len()).any(|part| part == needle)
        })
        .collect()
    }

    /// Nothing of the node may be left: no mount, no process. What ends by itself gets a while.
    #[track_caller]
    pub fn nothing_is_left(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !self.mounts().is_empty() || !self.processes().is_empty() {
            if Instant::now() > deadline {
                let log = |name: &str| {
                    fs::read_to_string(self.data().join("run").join(name)).unwrap_or_default()
                };
                panic!(
                    "left: {:?} {:?}\n{}\n{}",
                    self.mounts(),
                    self.processes(),
                    log("node.log"),
                    log("fsd.log")
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Mount points below this world's directory, the deepest first.
    pub fn mounts(&self) -> Vec<PathBuf> {
        let mounts = sys::mount::read_mounts().unwrap_or_default();
        let mut points: Vec<PathBuf> = mounts
            .into_iter()
            .map(|mount| mount.mount_point)
            .filter(|point| point.starts_with(self.dir.path()))
            .collect();
        points.sort();
        points.reverse();
        points
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // By itself first, so that what `down` forgets is seen by the tests that look for it.
        _ = self.command(&["down"]).output();
        for point in self.mounts() {
            _ = sys::mount::unmount(&point, sys::mount::Unmount::Lazy);
        }
        for pid in self.processes() {
            kill(pid, 9);
        }
        // A group cannot be removed before its last process is reaped, which init does in its own time.
        for _ in 0..400 {
            if fsd::keeper::groups_of(&self.data()).is_empty() {
                break;
            }
            fsd::keeper::remove_empty_groups();
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A command that goes on for longer hangs.
const PATIENCE: Duration = Duration::from_secs(90);

/// Runs a command to its end.
#[track_caller]
pub fn finish(mut command: Command) -> Done {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    end_of(child, &format!("{command:?}"))
}

/// Waits for a child that was spawned with pipes; kills it and fails when it hangs.
#[track_caller]
pub fn end_of(child: Child, what: &str) -> Done {
    let pid = child.id();
    let (told, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || told.send(child.wait_with_output()));
    let output = match ended.recv_timeout(PATIENCE) {
        Ok(output) => output.unwrap(),
        Err(_) => {
            let stack = fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
            kill(pid, 9);
            panic!("{what} hangs (alive: {}, in {stack})", !stack.is_empty());
        }
    };
    Done {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Waits until something holds; fails with `what` when it never does.
#[track_caller]
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn alive(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = status.rsplit(')').next().and_then(|rest| rest.trim().chars().next());
    state.is_some_and(|state| state != 'Z')
}

/// Sends a signal. After a SIGKILL the process is gone when this returns: a process that is dying still
/// takes connections.
pub fn kill(pid: u32, signal: i32) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    let signal = rustix::process::Signal::from_named_raw(signal).unwrap();
    let Ok(process) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) else {
        return;
    };
    _ = rustix::process::pidfd_send_signal(&process, signal);
    if signal == rustix::process::Signal::KILL {
        let mut ended = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
        let patience = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
        rustix::event::poll(&mut ended, Some(&patience)).unwrap();
    }
}

/// Bytes that do not compress, the same for the same seed.
pub fn noise(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..count).map(step).collect()
}
