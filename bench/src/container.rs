//! Containers of the peers, crun and runc: an OCI bundle with the namespaces and limits that ours have,
//! over a writable overlay of given trees.
//!
//! Dropping a container unmounts it and removes its folder.

use crate::corpus::remove_tree;
use crate::shell;
use anyhow::Context;
use serde_json::{Value, json};
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use sys::mount::{
    AttributeChange, Attributes, Overlay, OverlayLower, OverlayUpper, Propagation, Recursive,
    Unmount,
};
use sys::process::Namespaces;

/// Runs something in a thread with a mount namespace of its own, whose mounts end with it.
///
/// crun refuses a host that has controllers in both cgroup versions; in there it sees version 1 alone.
/// This costs the peers nothing: what the thread starts is born into the namespace.
pub fn apart<T: Send>(work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    let thread = || {
        sys::process::unshare(Namespaces::MOUNT).context("cannot leave the mount namespace")?;
        let private = AttributeChange {
            propagation: Some(Propagation::Private),
            recursive: Recursive::Yes,
            ..AttributeChange::default()
        };
        sys::mount::set_attributes_of(Path::new("/"), &private)?;
        let second = Path::new("/sys/fs/cgroup/unified");
        if second.exists() {
            sys::mount::unmount(second, Unmount::Lazy)?;
        }
        work()
    };
    std::thread::scope(|scope| scope.spawn(thread).join())
        .map_err(|_| anyhow::anyhow!("the thread of a container panicked"))?
}

/// The limits that all sides get.
pub const MEMORY_BYTES: u64 = 512 << 20;
/// Most processes and threads.
pub const PIDS: u32 = 256;
/// Thousandths of a core.
pub const CPU_MILLIS: u32 = 1000;

/// A bundle's folder: `config.json`, `rootfs`, `upper`, `work`.
#[derive(Debug)]
pub struct Bundle {
    dir: PathBuf,
    id: String,
}

impl Bundle {
    /// Writes a bundle `name` below `scratch`.
    pub fn create(
        scratch: &Path,
        name: &str,
        env: &[String],
        argv: &[&str],
    ) -> anyhow::Result<Self> {
        let id = format!("lamella-bench-{}-{name}", std::process::id());
        let dir = scratch.join(&id);
        for folder in ["rootfs", "upper", "work"] {
            fs::create_dir_all(dir.join(folder))?;
        }
        fs::write(dir.join("config.json"), serde_json::to_vec(&configuration(&id, env, argv))?)?;
        Ok(Self { dir, id })
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        // A leftover folder only costs space.
        let _ = remove_tree(&self.dir);
    }
}

/// A bundle whose root is mounted.
#[derive(Debug)]
pub struct Container {
    bundle: Bundle,
}

impl Container {
    /// Mounts an overlay of `lowers` (bottom first) as the bundle's root.
    pub fn mount(bundle: Bundle, lowers: &[PathBuf]) -> anyhow::Result<Self> {
        let upper = fs::File::open(bundle.dir.join("upper"))?;
        let work = fs::File::open(bundle.dir.join("work"))?;
        let lowers: Vec<OverlayLower<'_>> =
            lowers.iter().rev().map(|path| OverlayLower::Path(path)).collect();
        let overlay = Overlay {
            name: "bench",
            lowers: &lowers,
            upper: Some(OverlayUpper { upper: upper.as_fd(), work: work.as_fd() }),
            volatile: true,
        };
        let mount =
            overlay.mount_detached(Attributes::default()).context("cannot mount overlay")?;
        mount.attach(&bundle.dir.join("rootfs")).context("cannot attach overlay")?;
        Ok(Self { bundle })
    }

    /// Creates, runs and removes the container with `runtime`; answers the command's output.
    pub fn run(&self, runtime: &str) -> anyhow::Result<String> {
        let mut command = shell::command(&[runtime, "run", "--bundle"]);
        shell::output(command.arg(&self.bundle.dir).arg(&self.bundle.id))
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // Lazily, so that a process that hangs in it cannot keep it in sight.
        let _ = sys::mount::unmount(&self.bundle.dir.join("rootfs"), Unmount::Lazy);
    }
}

fn configuration(id: &str, env: &[String], argv: &[&str]) -> Value {
    let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned();
    let env: Vec<String> = std::iter::once(path).chain(env.iter().cloned()).collect();
    let capabilities = [
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FSETID",
        "CAP_FOWNER",
        "CAP_MKNOD",
        "CAP_SETGID",
        "CAP_SETUID",
        "CAP_SETFCAP",
        "CAP_SETPCAP",
        "CAP_NET_BIND_SERVICE",
        "CAP_SYS_CHROOT",
        "CAP_KILL",
        "CAP_AUDIT_WRITE",
    ];
    let mount = |destination: &str, kind: &str, options: &[&str]| json!({"destination": destination, "type": kind, "source": kind, "options": options});
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false, "cwd": "/", "user": {"uid": 0, "gid": 0}, "args": argv, "env": env,
            "noNewPrivileges": true,
            "capabilities": {
                "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
            },
        },
        "root": {"path": "rootfs", "readonly": false},
        "hostname": "sandbox",
        "mounts": [
            mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
            mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
            mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
            mount("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
            mount("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
            mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        ],
        "linux": {
            "cgroupsPath": format!("/{id}"),
            "namespaces": [
                {"type": "pid"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
            ],
            "resources": {
                "memory": {"limit": MEMORY_BYTES},
                "pids": {"limit": PIDS},
                "cpu": {"quota": CPU_MILLIS * 100, "period": 100_000},
            },
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_peers_run_a_bundle_over_an_overlay() -> anyhow::Result<()> {
        let scratch = tempfile::Builder::new().tempdir_in("/var/tmp")?;
        let lower = scratch.path().join("lower");
        fs::create_dir_all(lower.join("bin"))?;
        fs::copy("/bin/busybox", lower.join("bin/busybox"))?;
        for runtime in ["crun", "runc"] {
            let argv = ["/bin/busybox", "sh", "-c", "echo $WORD > /made; cat /made"];
            let bundle =
                Bundle::create(scratch.path(), runtime, &["WORD=hello".to_owned()], &argv)?;
            let lowers = std::slice::from_ref(&lower);
            let said = apart(|| Container::mount(bundle, lowers)?.run(runtime))?;
            assert_eq!(said, "hello\n", "{runtime}");
        }
        assert!(!lower.join("made").exists());
        assert_eq!(fs::read_dir(scratch.path())?.count(), 1);
        Ok(())
    }
}
