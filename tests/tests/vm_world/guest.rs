//! A real Linux guest under QEMU's software emulation: Debian's cloud kernel, and an initramfs that is
//! put together here from busybox and the kernel's own modules. `cargo xtask setup` brings all of it.

use super::cpio::Archive;
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

const QEMU: &str = "/usr/bin/qemu-system-x86_64";
const BUSYBOX: &str = "/usr/bin/busybox";
/// Where `cargo xtask setup` unpacks the kernel's package.
const KERNEL_FOLDER: &str = "/var/cache/lamella/guest/linux";
/// Lines of a guest's script that are meant for the test begin with this.
const MARK: &str = "=> ";
/// A boot takes 5 to 12 s on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// The bus that all devices of a guest are on.
const BUS_MODULE: &str = "virtio_pci";

/// What this host lacks for a guest, if anything.
pub fn missing() -> Option<&'static str> {
    let kernel = || kernel().is_ok();
    match () {
        () if !Path::new(QEMU).exists() => Some("qemu-system-x86"),
        () if !Path::new(BUSYBOX).exists() => Some("busybox-static"),
        () if !kernel() => Some("a guest kernel"),
        () => None,
    }
}

fn kernel() -> Result<PathBuf> {
    let boot = Path::new(KERNEL_FOLDER).join("boot");
    for entry in std::fs::read_dir(&boot).with_context(|| format!("list {}", boot.display()))? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-")) {
            return Ok(path);
        }
    }
    bail!("no kernel in {}", boot.display())
}

fn find_module(folder: &Path, name: &str) -> Result<Option<PathBuf>> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            if let Some(found) = find_module(&path, name)? {
                return Ok(Some(found));
            }
        } else if path.file_name().is_some_and(|file| file == name) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// The names behind `depends=` in a module's own description.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let found = module.windows(KEY.len()).position(|window| window == KEY);
    let list = found.map_or(&[][..], |at| &module[at + KEY.len()..]);
    let list = list.split(|byte| *byte == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(list).into_owned();
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Adds a module behind everything that it depends on. What a kernel has built in is no file.
fn add_module(loads: &mut Vec<(String, Vec<u8>)>, name: &str) -> Result<()> {
    let modules = Path::new(KERNEL_FOLDER).join("lib/modules");
    let Some(path) = find_module(&modules, &format!("{name}.ko"))? else { return Ok(()) };
    let module = std::fs::read(path)?;
    for needed in dependencies(&module) {
        add_module(loads, &needed)?;
    }
    if !loads.iter().any(|(known, _)| known == name) {
        loads.push((name.to_owned(), module));
    }
    Ok(())
}

/// What a guest is started with.
pub struct Plan<'plan> {
    /// Modules beside that of the bus; what they depend on comes along.
    pub modules: &'plan [&'plan str],
    /// Devices and memory.
    pub qemu: Vec<String>,
    /// What init does, as lines of busybox's shell.
    pub script: &'plan str,
}

/// A running guest; ends with this value.
pub struct Guest {
    qemu: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    transcript: String,
    deadline: Instant,
}

fn initramfs(plan: &Plan<'_>, at: &Path) -> Result<()> {
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "proc", "sys", "mnt", "m"] {
        archive.folder(folder);
    }
    archive.file("bin/busybox", 0o755, &std::fs::read(BUSYBOX)?);
    let mut modules = Vec::new();
    for name in std::iter::once(&BUS_MODULE).chain(plan.modules) {
        add_module(&mut modules, name)?;
    }
    let mut loads = String::new();
    for (name, module) in &modules {
        archive.file(&format!("m/{name}.ko"), 0o644, module);
        loads.push_str(&format!("insmod /m/{name}.ko\n"));
    }
    let init = format!(
        "#!/bin/busybox sh\n/bin/busybox --install -s /bin\nexport PATH=/bin\n\
         mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev\n\
         {loads}{}\npoweroff -f\n",
        plan.script
    );
    archive.file("init", 0o755, init.as_bytes());
    std::fs::write(at, archive.finish()).with_context(|| format!("write {}", at.display()))
}

impl Guest {
    /// Boots; `folder` takes what QEMU reads at start.
    pub fn boot(plan: &Plan<'_>, folder: &Path) -> Result<Self> {
        let initrd = folder.join("initrd");
        initramfs(plan, &initrd)?;
        let log = File::create(folder.join("qemu.log"))?;
        let mut qemu = Command::new(QEMU)
            .args(["-accel", "tcg,thread=multi", "-cpu", "max", "-nodefaults", "-no-reboot"])
            .args(["-display", "none", "-monitor", "none", "-serial", "stdio"])
            .args(&plan.qemu)
            .arg("-kernel")
            .arg(kernel()?)
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", "console=ttyS0 panic=-1 quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .context("start QEMU")?;
        let input = qemu.stdin.take().context("QEMU's input")?;
        let output = qemu.stdout.take().context("QEMU's output")?;
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let deadline = Instant::now() + PATIENCE;
        Ok(Self { qemu, input, lines, transcript: String::new(), deadline })
    }

    /// The marked lines up to the one that is `last`.
    pub fn read_until(&mut self, last: &str) -> Result<Vec<String>> {
        let mut marked = Vec::new();
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.transcript.push_str(&line);
                    self.transcript.push('\n');
                    // The console may put an echo of ours before a line.
                    let Some((_, text)) = line.split_once(MARK) else { continue };
                    if text == last {
                        return Ok(marked);
                    }
                    marked.push(text.to_owned());
                }
                Err(RecvTimeoutError::Timeout) => {
                    bail!("the guest did not say {last:?}:\n{}", self.transcript)
                }
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("the guest ended before it said {last:?}:\n{}", self.transcript)
                }
            }
        }
    }

    /// Lets a `read` of the guest's script go on.
    pub fn go_on(&mut self) -> Result<()> {
        self.input.write_all(b"\n")?;
        Ok(self.input.flush()?)
    }

    /// Waits until the guest has switched itself off.
    pub fn wait(mut self) -> Result<()> {
        while Instant::now() < self.deadline {
            if let Some(status) = self.qemu.try_wait()? {
                ensure!(status.success(), "QEMU ended: {status}\n{}", self.transcript);
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("the guest does not end:\n{}", self.transcript)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}
