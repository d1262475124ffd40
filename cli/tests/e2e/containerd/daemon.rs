//! Debian's containerd with everything of it in the world's directory, and our snapshotter beside it.
//!
//! Dropping them ends them, the containers first, also when a test failed.

use crate::world::{Done, World, alive, eventually, finish, kill};
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// `lamella snapshotter`.
pub struct Snapshotter {
    process: Child,
}

impl Snapshotter {
    pub fn start(world: &World) -> Self {
        let mut process = world.command(&["snapshotter"]).stderr(Stdio::null()).spawn().unwrap();
        let socket = world.data().join("run/snapshotter.sock");
        eventually("the snapshotter listens", || {
            assert!(process.try_wait().unwrap().is_none(), "the snapshotter ended");
            UnixStream::connect(&socket).is_ok()
        });
        Self { process }
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn kill(&mut self) {
        kill(self.process.id(), 9);
        self.process.wait().unwrap();
    }
}

impl Drop for Snapshotter {
    fn drop(&mut self) {
        if self.process.try_wait().is_ok_and(|ended| ended.is_none()) {
            kill(self.process.id(), 15);
        }
        _ = self.process.wait();
    }
}

/// containerd, and one namespace in it that no other test has.
pub struct Containerd {
    process: Child,
    dir: PathBuf,
    namespace: String,
}

impl Containerd {
    pub fn start(world: &World) -> Self {
        let dir = world.path("containerd");
        fs::create_dir(&dir).unwrap();
        let config = format!(
            "version = 2\nroot = '{0}/root'\nstate = '{0}/state'\n\
             disabled_plugins = ['io.containerd.grpc.v1.cri', 'io.containerd.internal.v1.opt', \
             'io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.zfs', \
             'io.containerd.snapshotter.v1.devmapper', 'io.containerd.snapshotter.v1.aufs']\n\
             [grpc]\naddress = '{0}/c.sock'\n\
             [proxy_plugins.lamella]\ntype = 'snapshot'\naddress = '{1}'\n",
            dir.display(),
            world.data().join("run/snapshotter.sock").display()
        );
        fs::write(dir.join("config.toml"), config).unwrap();
        let log = fs::File::create(dir.join("log")).unwrap();
        let process = Command::new("containerd")
            .arg("-c")
            .arg(dir.join("config.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("containerd is installed by `cargo xtask setup`");
        let unique = dir.parent().and_then(Path::file_name).unwrap().to_str().unwrap();
        let mut it = Self { process, namespace: unique.replace('.', "-"), dir };
        eventually("containerd serves", || {
            assert!(it.process.try_wait().unwrap().is_none(), "containerd ended");
            UnixStream::connect(it.address()).is_ok() && it.ctr(&["version"]).code == 0
        });
        it
    }

    pub fn address(&self) -> PathBuf {
        self.dir.join("c.sock")
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// `ctr` on it.
    pub fn ctr(&self, words: &[&str]) -> Done {
        let mut command = Command::new("ctr");
        command.arg("-a").arg(self.address()).args(["-n", &self.namespace]).args(words);
        command.stdin(Stdio::null());
        finish(command)
    }

    /// The words of `lamella containerd add` here.
    pub fn add(&self, reference: &str, image: &str) -> Vec<String> {
        let address = self.address().display().to_string();
        let words = ["containerd", "add", "--json", reference, image, "--address", &address];
        let words = [&words[..], &["--namespace", &self.namespace]].concat();
        words.into_iter().map(str::to_owned).collect()
    }

    /// Runs a container to its end.
    pub fn run(&self, image: &str, id: &str, script: &str) -> Done {
        let words = ["run", "--rm", "--snapshotter", "lamella", image, id, "/bin/sh", "-c", script];
        self.ctr(&words)
    }

    /// A command in a container prints this. `ctr` loses the output of a quick one now and then.
    #[track_caller]
    pub fn shows(&self, id: &str, script: &str, expected: &str) {
        let words = ["tasks", "exec", "--exec-id", "x", id, "/bin/sh", "-c", script];
        eventually(&format!("{script} prints {expected:?}"), || {
            let done = self.ctr(&words);
            done.code == 0 && done.out == expected
        });
    }

    /// Ends a container and removes it.
    pub fn remove(&self, id: &str) {
        self.ctr(&["tasks", "kill", "-s", "SIGKILL", id]).ok();
        eventually("the task is gone", || self.ctr(&["tasks", "rm", id]).code == 0);
        self.ctr(&["containers", "rm", id]).ok();
    }

    /// The control groups of its containers.
    fn groups(&self) -> Vec<PathBuf> {
        let hierarchies = fs::read_dir("/sys/fs/cgroup").unwrap().flatten();
        let groups = hierarchies.map(|it| it.path().join(&self.namespace));
        let own = Path::new("/sys/fs/cgroup").join(&self.namespace);
        groups.chain([own]).filter(|group| group.is_dir()).collect()
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        // Whatever a failed test left. Once their processes are gone, the shims tell and end.
        for group in self.groups() {
            for container in fs::read_dir(&group).into_iter().flatten().flatten() {
                let processes = fs::read_to_string(container.path().join("cgroup.procs"));
                for pid in processes.unwrap_or_default().lines() {
                    kill(pid.parse().unwrap(), 9);
                }
            }
        }
        let listed = self.ctr(&["containers", "ls", "-q"]).out;
        for id in listed.lines() {
            self.ctr(&["tasks", "rm", "-f", id]);
            self.ctr(&["containers", "rm", id]);
        }
        kill(self.process.id(), 15);
        _ = self.process.wait();
        for group in self.groups() {
            for container in fs::read_dir(&group).into_iter().flatten().flatten() {
                _ = fs::remove_dir(container.path());
            }
            _ = fs::remove_dir(group);
        }
        _ = fs::remove_dir(Path::new("/run/containerd/runc").join(&self.namespace));
        debug_assert!(!alive(self.process.id()));
    }
}
