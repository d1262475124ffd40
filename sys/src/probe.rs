//! What this kernel and this host can do, found out by doing each thing once on scratch objects.
//!
//! For: choosing planes and backends, `doctor`, and tests that must say what they lack. Nothing is
//! guessed from a version number. The result is a value that is passed by reference; there is no global.
//!
//! Everything that a probe makes (files, mounts, groups, processes, namespaces) is gone when it returns,
//! also when it fails. Killed in the middle, it can leave a folder `probe-*` in the scratch folder and an
//! empty cgroup `lamella-probe-*`; no mount, since every mount stays detached.

mod control_groups;
mod devices;
mod image;
mod kernel;
mod storage;

pub use image::{BLOCK_BYTES, tiny_erofs_metadata};

use serde::Serialize;
use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

macro_rules! capabilities {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $remedy:literal;)*) => {
        /// Something that a kernel, its configuration or a host can do or not.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum Capability {
            $($(#[$doc])* $name,)*
        }

        impl Capability {
            /// All of them, in the order in which they are probed and shown.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The name that people and lists of skipped tests use.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// What helps when it is missing.
            fn remedy(self) -> &'static str {
                match self {
                    $(Self::$name => $remedy,)*
                }
            }
        }
    };
}

capabilities! {
    /// EROFS mounted from plain files, with a data device.
    ErofsFileBacked = "erofs-file-backed",
        "Linux 6.12 with CONFIG_EROFS_FS_BACKED_BY_FILE, scratch on ext4, XFS or btrfs";
    /// Pre-content events of fanotify that fill an EROFS data device.
    FanotifyPreContent = "fanotify-pre-content",
        "Linux 6.14 with CONFIG_FANOTIFY_ACCESS_PERMISSIONS, scratch on ext4, XFS or btrfs";
    /// FUSE mounts.
    Fuse = "fuse", "CONFIG_FUSE_FS and /dev/fuse";
    /// FUSE files that the kernel reads without the daemon.
    FusePassthrough = "fuse-passthrough", "Linux 6.9 with CONFIG_FUSE_PASSTHROUGH";
    /// FUSE requests over io_uring.
    FuseIoUring = "fuse-io-uring",
        "Linux 6.14 with CONFIG_FUSE_IO_URING, then: echo Y > /sys/module/fuse/parameters/enable_uring";
    /// EROFS on demand through cachefiles.
    ErofsFscache = "erofs-fscache",
        "Linux 5.19 to 7.1 with CONFIG_EROFS_FS_ONDEMAND and CONFIG_CACHEFILES_ONDEMAND";
    /// Overlays built from descriptors of detached mounts.
    OverlayDescriptors = "overlay-descriptors", "Linux 6.13 with CONFIG_OVERLAY_FS";
    /// Mounts that shift owners.
    IdmappedMounts = "idmapped-mounts", "Linux 5.12 with CONFIG_USER_NS";
    /// Blocks shared between files of the scratch file system.
    Reflink = "reflink", "scratch on XFS or btrfs; copies are whole otherwise";
    /// Writes that do not stay in the page cache.
    UncachedWrites = "uncached-writes", "Linux 6.14, scratch on ext4, XFS or btrfs";
    /// Files that get their name when they are complete.
    UnnamedFiles = "unnamed-files", "a scratch file system with O_TMPFILE";
    /// Limits of the size of a folder tree on the scratch file system.
    ProjectQuota = "project-quota", "mount the scratch file system with prjquota";
    /// Processes born in a cgroup v2.
    CloneIntoCgroup = "clone-into-cgroup", "Linux 5.7 with a mounted cgroup v2";
    /// Memory limits.
    CgroupMemory = "cgroup-memory", "mount the memory controller, v1 or v2, writable";
    /// Limits of the number of tasks.
    CgroupPids = "cgroup-pids", "mount the pids controller, v1 or v2, writable";
    /// CPU limits.
    CgroupCpu = "cgroup-cpu", "mount the cpu controller, v1 or v2, writable";
    /// Freezing of groups.
    CgroupFreezer = "cgroup-freezer", "mount cgroup v2, or the v1 freezer, writable";
    /// Descriptors of processes.
    Pidfd = "pidfd", "Linux 5.4";
    /// System call filters.
    Seccomp = "seccomp", "CONFIG_SECCOMP_FILTER";
    /// Unprivileged access rules for files.
    Landlock = "landlock", "CONFIG_SECURITY_LANDLOCK and landlock in the lsm= list";
    /// AppArmor profiles.
    AppArmor = "apparmor", "CONFIG_SECURITY_APPARMOR and apparmor in the lsm= list";
    /// Programs at security hooks.
    BpfLsm = "bpf-lsm", "CONFIG_BPF_LSM and bpf in the lsm= list";
    /// Programs that decide about connections of a cgroup.
    BpfCgroup = "bpf-cgroup", "CONFIG_CGROUP_BPF and CAP_BPF";
    /// Packet filter tables.
    Nftables = "nftables", "CONFIG_NF_TABLES";
    /// User namespaces.
    UserNamespaces = "user-namespaces", "CONFIG_USER_NS and user.max_user_namespaces above 0";
    /// Network namespaces.
    NetworkNamespaces = "network-namespaces", "CONFIG_NET_NS";
    /// Memory files that nobody can change.
    MemfdSeals = "memfd-seals", "CONFIG_MEMFD_CREATE";
    /// Page faults handled in user space.
    Userfaultfd = "userfaultfd", "CONFIG_USERFAULTFD";
    /// Asynchronous system calls.
    IoUring = "io-uring", "CONFIG_IO_URING and sysctl kernel.io_uring_disabled=0";
    /// Hardware virtual machines.
    Kvm = "kvm", "virtualisation in the firmware, CONFIG_KVM and /dev/kvm";
    /// Sockets between a host and its virtual machines, served by the kernel.
    VhostVsock = "vhost-vsock", "CONFIG_VHOST_VSOCK and /dev/vhost-vsock";
    /// Somewhere to put memory of paused sandboxes.
    Swap = "swap", "swapon a device, a file or zram";
    /// Siblings of a core kept from untrusted tasks.
    CoreScheduling = "core-scheduling", "Linux 5.14 with CONFIG_SCHED_CORE on a CPU with SMT";
    /// A lower score for the OOM killer.
    LowerOomScore = "lower-oom-score", "CAP_SYS_RESOURCE";
    /// Enough descriptors for many events at once.
    DescriptorLimit = "descriptor-limit", "raise the hard limit of open files to 65536";
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum Finding {
    /// It was done.
    Available {
        /// A version, a number, a kind: whatever tells this host from others.
        detail: String,
    },
    /// It was tried and failed.
    Missing {
        /// The errno of the attempt, where there was one.
        errno: Option<i32>,
        /// What the attempt answered.
        reason: String,
        /// What helps.
        remedy: String,
    },
    /// It was not tried.
    Untested {
        /// Why not.
        why: String,
    },
}

impl Finding {
    /// Whether it was done.
    pub fn is_available(&self) -> bool {
        matches!(self, Self::Available { .. })
    }
}

/// What one attempt answers: a detail, or why not.
type Attempt = io::Result<String>;

/// Why nothing was tried.
struct Untried(&'static str);

/// A failure without an errno: the kernel did something, but not this.
fn failed(text: &str) -> io::Error {
    io::Error::other(text.to_owned())
}

/// Folders of one process that probes: none meets another's.
static COUNTER: AtomicU32 = AtomicU32::new(0);

/// A name that no other probe uses.
fn unique_name(prefix: &str) -> String {
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}-{}-{number}", std::process::id())
}

/// A folder that is removed when its probe ends, however it ends.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn new(parent: &Path) -> io::Result<Self> {
        let path = parent.join(unique_name("probe"));
        std::fs::create_dir(&path)?;
        Ok(Self { path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "a probe left its folder behind");
        }
    }
}

/// What this host can do.
#[derive(Debug, Clone, Serialize)]
pub struct Capabilities {
    findings: Vec<(Capability, Finding)>,
}

impl Capabilities {
    /// Tries everything. `scratch` is an existing folder on the file system that the node's data will
    /// lie on; it is left as it was.
    pub fn probe(scratch: &Path) -> Self {
        Self::probe_only(scratch, Capability::ALL)
    }

    /// Tries some; the others are `Untested`.
    pub fn probe_only(scratch: &Path, wanted: &[Capability]) -> Self {
        let findings = Capability::ALL.iter().map(|capability| {
            let finding = if wanted.contains(capability) {
                judge(*capability, attempt(*capability, scratch))
            } else {
                Finding::Untested { why: "nobody asked".to_owned() }
            };
            (*capability, finding)
        });
        Self { findings: findings.collect() }
    }

    /// All findings, in the order of [`Capability::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Capability, &Finding)> {
        self.findings.iter().map(|(capability, finding)| (*capability, finding))
    }

    /// What was found about one of them.
    pub fn finding(&self, capability: Capability) -> Option<&Finding> {
        self.iter().find_map(|(of, finding)| (of == capability).then_some(finding))
    }

    /// Whether it was tried and worked.
    pub fn has(&self, capability: Capability) -> bool {
        self.finding(capability).is_some_and(Finding::is_available)
    }

    /// The first of these that is not available.
    pub fn first_missing(&self, needed: &[Capability]) -> Option<Capability> {
        needed.iter().copied().find(|capability| !self.has(*capability))
    }
}

/// For tests: probes what a test needs and, when something is missing, writes `SKIP <test>:
/// <capability>` as a line of its own to the standard output, past the test runner's capture, and
/// answers true.
pub fn skip_test(test: &str, scratch: &Path, needed: &[Capability]) -> bool {
    let missing = Capabilities::probe_only(scratch, needed).first_missing(needed);
    if let Some(missing) = missing {
        // One write, so that lines of parallel tests do not mix. A closed output loses the line only.
        let line = format!("\nSKIP {test}: {missing}\n");
        let _ = io::stdout().lock().write_all(line.as_bytes());
    }
    missing.is_some()
}

fn judge(capability: Capability, attempt: Result<Attempt, Untried>) -> Finding {
    match attempt {
        Ok(Ok(detail)) => Finding::Available { detail },
        Ok(Err(error)) => Finding::Missing {
            errno: crate::errno_of(&error),
            reason: error.to_string(),
            remedy: capability.remedy().to_owned(),
        },
        Err(Untried(why)) => Finding::Untested { why: why.to_owned() },
    }
}

fn attempt(capability: Capability, scratch: &Path) -> Result<Attempt, Untried> {
    use Capability as C;
    Ok(match capability {
        C::ErofsFileBacked => storage::erofs_file_backed(scratch),
        C::FanotifyPreContent => storage::fanotify_pre_content(scratch),
        C::Fuse => devices::fuse(devices::FuseFeature::Mount),
        C::FusePassthrough => devices::fuse(devices::FuseFeature::Passthrough),
        C::FuseIoUring => devices::fuse(devices::FuseFeature::IoUring),
        C::ErofsFscache => devices::erofs_fscache(scratch),
        C::OverlayDescriptors => storage::overlay_descriptors(),
        C::IdmappedMounts => storage::idmapped_mounts(),
        C::Reflink => storage::reflink(scratch),
        C::UncachedWrites => storage::uncached_writes(scratch),
        C::UnnamedFiles => storage::unnamed_files(scratch),
        C::ProjectQuota => storage::project_quota(scratch),
        C::CloneIntoCgroup => control_groups::clone_into(),
        C::CgroupMemory => control_groups::memory(),
        C::CgroupPids => control_groups::pids(),
        C::CgroupCpu => control_groups::cpu(),
        C::CgroupFreezer => control_groups::freezer(),
        C::Pidfd => kernel::pidfd(),
        C::Seccomp => kernel::seccomp(),
        C::Landlock => kernel::landlock(),
        C::AppArmor => kernel::security_module("apparmor"),
        C::BpfLsm => return kernel::bpf_lsm(),
        C::BpfCgroup => kernel::bpf_cgroup(),
        C::Nftables => kernel::nftables(),
        C::UserNamespaces => kernel::user_namespaces(),
        C::NetworkNamespaces => kernel::network_namespaces(),
        C::MemfdSeals => kernel::memfd_seals(),
        C::Userfaultfd => kernel::userfaultfd(),
        C::IoUring => kernel::io_uring(),
        C::Kvm => devices::kvm(),
        C::VhostVsock => devices::vhost_vsock(),
        C::Swap => kernel::swap(),
        C::CoreScheduling => return kernel::core_scheduling(),
        C::LowerOomScore => kernel::lower_oom_score(),
        C::DescriptorLimit => kernel::descriptor_limit(),
    })
}

#[cfg(test)]
mod tests;
