//! The init of a sandbox: a copy of the zygote that builds what the sandbox sees, gives up every right
//! and every descriptor, and sleeps for ever while the kernel reaps its children.
//!
//! It runs nothing of the image. It cannot be traced, dumped or signalled from inside: its memory is
//! marked undumpable, and it is process 1 of its namespace. When it dies, everything in the sandbox does.

use crate::users::Users;
use crate::wire::{Failure, Step};
use crate::zygote::{Shared, failed};
use crate::{protect, stage};
use proto::launch::{Launch, Ready, Reply};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use sys::capability::{self, CapabilitySet};
use sys::identity::FileIdentity;
use sys::mount::{
    self, AttributeChange, Attributes, DevPts, MountFd, Mqueue, Proc, Recursive, Tmpfs,
};
use sys::process::{self, Namespaces, Resource, signals};

/// Parts of /proc that tell of or reach the host: covered. Which of them exist depends on the kernel, and
/// changes when it loads a module.
const MASKED_FOLDERS: [&str; 3] = ["acpi", "asound", "scsi"];
const MASKED_FILES: [&str; 18] = [
    "cmdline",
    "diskstats",
    "interrupts",
    "iomem",
    "ioports",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "kpagecgroup",
    "kpagecount",
    "kpageflags",
    "latency_stats",
    "modules",
    "partitions",
    "sched_debug",
    "sysrq-trigger",
    "timer_list",
];

/// Files that root of the host alone may read: covered where root of the sandbox is the same to the kernel.
const MASKED_FROM_HOST_ROOT: [&str; 3] = ["pagetypeinfo", "slabinfo", "vmallocinfo"];

/// Parts of /proc that may be read only.
const READ_ONLY: [&str; 4] = ["bus", "fs", "irq", "sys"];

/// Becomes the init that `launch` asks for. Never returns.
pub fn become_init(
    shared: &Shared,
    launch: &Launch,
    root: OwnedFd,
    users: Option<&Users>,
    network: Option<&OwnedFd>,
) -> ! {
    let built = build(shared, launch, &MountFd::from_fd(root), users, network)
        .and_then(|()| confine(shared, launch, users).step(|| "confine the init".into()));
    if let Err(failure) = built {
        let _runtime_gone = shared.wire.send(failed(launch.request, &failure), &[]);
        let _none_left = process::close_from(0);
        std::process::exit(1);
    }
    let ready = Reply::Ready(Ready { request: launch.request });
    if shared.wire.send(ready, &[]).is_err() {
        // Nobody would ever know of this sandbox.
        std::process::exit(1);
    }
    // INVARIANT: until its descriptors are closed the init holds rights that nobody in the sandbox has,
    // so that nobody there can reach them; then it gives up all.
    let gone = process::close_from(0).and_then(|()| capability::set(CapabilitySet::NONE));
    if gone.is_err() {
        std::process::exit(1);
    }
    signals::sleep_forever()
}

fn build(
    shared: &Shared,
    launch: &Launch,
    root: &MountFd,
    users: Option<&Users>,
    network: Option<&OwnedFd>,
) -> Result<(), Failure> {
    shared.join_version_1(&launch.group).step(|| format!("join group {}", launch.group))?;
    match network {
        Some(used) => process::enter_namespace(used.as_fd()).step(|| "enter the network".into())?,
        None => process::loopback_up().step(|| "bring loopback up".into())?,
    }
    // After joining, so that the group is the root of what the sandbox sees.
    process::unshare(Namespaces::CGROUP).step(|| "unshare the cgroup view".into())?;
    process::set_host_name(launch.hostname.as_bytes()).step(|| "set the host name".into())?;
    root.attach(Path::new(stage::ROOT)).step(|| "attach the root".into())?;
    let proc = mount_proc(root, users.is_none()).step(|| "mount /proc".into())?;
    let mut is_new = network.is_none();
    if !is_new && !is_unused_network(&proc) {
        process::unshare(Namespaces::NET)
            .and_then(|()| process::loopback_up())
            .step(|| "make a network".into())?;
        is_new = true;
    }
    if is_new && users.is_some() {
        open_low_ports(&proc).step(|| "open the ports below 1024".into())?;
    }
    {
        // What is made for the sandbox belongs to its root.
        let assume = |users: &Users| FileIdentity::assume(users.first_id, users.first_id);
        let _as_its_root =
            users.map(assume).transpose().step(|| "act as the sandbox's root".into())?;
        devices(root, launch.shm_bytes, users).step(|| "mount /dev".into())?;
        files(root, launch).step(|| "bind the files of /etc".into())?;
    }
    cover(root, "sys", stage::sys()).step(|| "mount /sys".into())?;
    protect::cover(root, &launch.protected)?;
    mount::pivot_root(root.as_fd()).step(|| "pivot_root".into())
}

/// Attaches `what` over `path`, which resolves inside `inside` whatever symlinks say.
fn cover(inside: &MountFd, path: &str, what: io::Result<MountFd>) -> io::Result<()> {
    let place = inside.open_inside(Path::new(path))?;
    mount::attach_at(&what?, place.as_fd(), Path::new(""))
}

/// [`cover`] where the path may be absent.
fn cover_present(inside: &MountFd, path: &str, what: io::Result<MountFd>) -> io::Result<()> {
    match cover(inside, path, what) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn mount_proc(root: &MountFd, is_host_root: bool) -> io::Result<MountFd> {
    let proc = Proc::default().mount_detached(Attributes::KERNEL)?;
    let place = root.open_inside(Path::new("proc"))?;
    mount::attach_at(&proc, place.as_fd(), Path::new(""))?;
    // Nobody can put a link into a new /proc, so its names mean what they say.
    for path in READ_ONLY {
        let part = match mount::clone_tree_at(proc.as_fd(), Path::new(path), Recursive::No) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            part => part?,
        };
        let set = Attributes { read_only: true, ..Attributes::KERNEL };
        part.set_attributes(&AttributeChange { set, ..AttributeChange::default() })?;
        mount::attach_at(&part, proc.as_fd(), Path::new(path))?;
    }
    mask(&proc, &MASKED_FOLDERS, stage::empty)?;
    mask(&proc, &MASKED_FILES, stage::null)?;
    if is_host_root {
        mask(&proc, &MASKED_FROM_HOST_ROOT, stage::null)?;
    }
    Ok(proc)
}

/// Covers those of `paths` that exist.
fn mask(proc: &MountFd, paths: &[&str], cover: impl Fn() -> io::Result<MountFd>) -> io::Result<()> {
    let mut unused = None;
    for path in paths {
        let mask = unused.take().map_or_else(&cover, Ok)?;
        match mount::attach_at(&mask, proc.as_fd(), Path::new(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => unused = Some(mask),
            attached => attached?,
        }
    }
    Ok(())
}

/// Whether nothing is left of the sandbox that had this network before: no socket of any kind, no
/// connection that waits for its time to be over, and nothing counted that would tell what it did. Its settings
/// cannot have changed: nobody inside has the right. Making a network namespace is the most expensive step of
/// a launch, so they are used again.
fn is_unused_network(proc: &MountFd) -> bool {
    const COUNTS: [&str; 4] = ["dev", "snmp", "snmp6", "netstat"];
    let has_counted = |name| read_network(proc, name).is_ok_and(|text| !counts_nothing(&text));
    has_no_socket(proc) && !COUNTS.into_iter().any(has_counted)
}

/// A file of the network that this process is in.
fn read_network(proc: &MountFd, name: &str) -> io::Result<String> {
    use std::io::Read;
    let flags = sys::file::OFlags::RDONLY | sys::file::OFlags::CLOEXEC;
    let own = format!("{}/net/{name}", process::own_pid());
    let file = sys::file::open_beneath(proc.as_fd(), Path::new(&own), flags, 0)?;
    let mut text = String::new();
    std::fs::File::from(file).read_to_string(&mut text)?;
    Ok(text)
}

/// Whether every line of numbers has zeros only, but for what are settings and no counts.
fn counts_nothing(text: &str) -> bool {
    text.lines().all(|line| {
        let mut words = line.split_ascii_whitespace();
        let settings = match words.next() {
            // Forwarding and the default lifetime; the algorithm and its bounds.
            Some("Ip:") => 2,
            Some("Tcp:") => 4,
            _ => 0,
        };
        let is_zero = words.clone().skip(settings).all(|word| word == "0");
        // A line of names.
        is_zero || words.any(|word| word.parse::<i64>().is_err())
    })
}

fn has_no_socket(proc: &MountFd) -> bool {
    let Ok(text) = read_network(proc, "sockstat") else { return false };
    let has = |line: &str, key: &str| {
        let words = text.lines().find(|known| known.starts_with(line)).unwrap_or_default();
        let mut words = words.split_whitespace();
        words.find(|word| *word == key).and(words.next()) == Some("0")
    };
    has("sockets:", "used") && has("TCP:", "inuse") && has("TCP:", "tw")
}

/// Root of the sandbox has no right over its network, which belongs to the host's users: not even that to
/// serve at a low port.
fn open_low_ports(proc: &MountFd) -> io::Result<()> {
    let name = Path::new("sys/net/ipv4/ip_unprivileged_port_start");
    let flags = sys::file::OFlags::WRONLY | sys::file::OFlags::CLOEXEC;
    // A copy without the mount that makes it read-only.
    let bare = proc.try_clone_tree(Recursive::No)?;
    let file = sys::file::open_beneath(bare.as_fd(), name, flags, 0)?;
    std::fs::File::from(file).write_all(b"0")
}

fn devices(root: &MountFd, shm_bytes: u64, users: Option<&Users>) -> io::Result<()> {
    let dev = stage::dev(users)?;
    let place = root.open_inside(Path::new("dev"))?;
    mount::attach_at(&dev, place.as_fd(), Path::new(""))?;
    let quiet = Attributes { nosuid: true, noexec: true, ..Attributes::default() };
    const TTY_GROUP: u32 = 5;
    let first_id = users.map_or(0, |users| users.first_id);
    let terminals = DevPts { gid: Some(first_id + TTY_GROUP), mode: 0o620 };
    cover(&dev, "pts", terminals.mount_detached(quiet))?;
    let shm = Tmpfs { name: "shm", mode: 0o1777, size_bytes: Some(shm_bytes), inodes: None };
    let open = Attributes { nosuid: true, nodev: true, ..Attributes::default() };
    cover(&dev, "shm", shm.mount_detached(open))?;
    cover(&dev, "mqueue", Mqueue.mount_detached(Attributes::KERNEL))
}

/// Names and resolver: on a small file system of the sandbox's own, so that nothing of them gets into
/// its writable layer. What the image does not have as a place stays absent.
fn files(root: &MountFd, launch: &Launch) -> io::Result<()> {
    let tmpfs = Tmpfs { name: "etc", mode: 0o755, size_bytes: Some(256 << 10), inodes: Some(8) };
    let small = tmpfs.mount_detached(Attributes { noexec: true, ..Attributes::KERNEL })?;
    small.attach(Path::new(stage::FILES))?;
    let hostname = format!("{}\n", launch.hostname);
    let contents: [(&str, &[u8]); 3] = [
        ("hosts", &launch.hosts),
        ("hostname", hostname.as_bytes()),
        ("resolv.conf", &launch.resolv_conf),
    ];
    for (name, content) in contents {
        let path = Path::new(stage::FILES).join(name);
        // The umask is zero here.
        let mut how = std::fs::OpenOptions::new();
        let mut file = how.write(true).create_new(true).mode(0o644).open(&path)?;
        file.write_all(content)?;
        let file = mount::clone_tree(&path, Recursive::No);
        cover_present(root, &format!("etc/{name}"), file)?;
    }
    Ok(())
}

fn confine(shared: &Shared, launch: &Launch, users: Option<&Users>) -> io::Result<()> {
    process::set_name("init")?;
    if launch.open_files > 0 {
        // For commands to find: its own descriptors are closed.
        let (_, hard) = process::limit_of(Resource::Descriptors)?;
        let bound = hard.min(launch.open_files.into());
        process::set_limit(Resource::Descriptors, bound, bound)?;
    }
    signals::ignore_child_exits()?;
    // Everything of the host that it needed is done. Entering gives all rights over what is inside.
    users.map_or(Ok(()), Users::enter)?;
    capability::limit_bounding_set(CapabilitySet::NONE)?;
    process::set_undumpable()?;
    process::set_no_new_privileges()?;
    shared.init_filter.install()
}
