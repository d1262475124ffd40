//! Requests, checked at the edge and trusted afterwards.

use crate::disk;
use crate::lifetimes::Lifetime;
use crate::network::NetworkRecord;
use crate::protect::{self, ProtectedPath};
use layer::{Error, ErrorKind, Result};
use proto::v1;
use std::collections::BTreeMap;
use sys::cgroup::Bandwidth;
use sys::profile::Profile;

/// A request to create a sandbox, validated. `None` is the default of the image or the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SandboxSpec {
    /// Reference or id of an environment or a layer.
    pub environment: String,
    /// Most bytes of memory.
    pub memory_bytes: Option<u64>,
    /// Thousandths of a core.
    pub cpu_millis: Option<u32>,
    /// Most tasks.
    pub pids: Option<u32>,
    /// Most bytes of the writable layer.
    pub disk_bytes: Option<u64>,
    /// Most files, folders and links in it.
    pub inodes: Option<u64>,
    /// Most descriptors of one process.
    pub open_files: Option<u32>,
    /// Bytes a second from and to the disk.
    pub bandwidth: Bandwidth,
    /// The share of processors when all want them.
    pub cpu_weight: Option<u32>,
    /// The only processors that it runs on.
    pub processors: Option<String>,
    /// `K=V` over the image's own.
    pub env: Vec<String>,
    /// Working directory.
    pub cwd: Option<String>,
    /// User.
    pub user: Option<String>,
    /// The sandbox's own command; empty: it idles until it is stopped.
    pub argv: Vec<String>,
    /// Labels of the caller.
    pub labels: BTreeMap<String, String>,
    /// The same key gives the same sandbox.
    pub idempotency_key: Option<String>,
    /// Host name.
    pub hostname: Option<String>,
    /// How its layers are given to the kernel.
    pub plane: v1::Plane,
    /// What it reaches on the network, and what reaches it.
    pub network: NetworkRecord,
    /// What it may ask of the kernel, and which rights its root has.
    pub profile: Profile,
    /// What it cannot change.
    pub protected: Vec<ProtectedPath>,
    /// How long it lives.
    pub lifetime: Lifetime,
    /// Milliseconds from the request on that its owner answers for it at least; 0: as long as it does already.
    pub lease_ms: u64,
}

/// The kernel refuses longer host names.
const MAX_HOSTNAME_BYTES: usize = 63;
/// Below this no process starts.
const MIN_MEMORY_BYTES: u64 = 1 << 20;
/// With fewer no program starts.
const MIN_OPEN_FILES: u32 = 16;
/// The kernel's own bound.
const MAX_CPU_WEIGHT: u32 = 10_000;
/// The longest list of processors.
const MAX_CPUSET_BYTES: usize = 1024;
/// What execve(2) takes for one string.
const MAX_STRING_BYTES: usize = 128 << 10;
/// What execve(2) takes together, with room to spare.
const MAX_STRINGS_BYTES: usize = 1536 << 10;

/// Validates a request.
pub fn sandbox(request: v1::CreateRequest) -> Result<SandboxSpec> {
    match v1::Backend::try_from(request.backend) {
        Ok(v1::Backend::Container) => {}
        Ok(v1::Backend::Fncall) => {
            let text = "a function call is no sandbox and has no life of its own: Call (`lamella call`) makes one";
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        Ok(other) => {
            let name = other.as_str_name();
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("backend {name} does not exist yet; container does"),
            ));
        }
        Err(_) => return Err(Error::invalid(format!("unknown backend {}", request.backend))),
    }
    let plane = v1::Plane::try_from(request.plane)
        .map_err(|_| Error::invalid(format!("unknown plane {}", request.plane)))?;
    if request.environment.is_empty() {
        return Err(Error::invalid("no environment is named"));
    }
    let (lifetime, lease_ms) = Lifetime::read(&request)?;
    let limits = request.limits.unwrap_or_default();
    if limits.memory_bytes != 0 && limits.memory_bytes < MIN_MEMORY_BYTES {
        return Err(Error::invalid("a memory limit below 1 MiB"));
    }
    rare_limits(&limits)?;
    if let Some(name) = &request.hostname {
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
        if name.is_empty() || name.len() > MAX_HOSTNAME_BYTES || !name.bytes().all(is_word) {
            return Err(Error::invalid(format!("host name {name:?}")));
        }
    }
    strings(&request.argv, &request.env)?;
    let some = |number: u32| (number != 0).then_some(number);
    let many = |number: u64| (number != 0).then_some(number);
    Ok(SandboxSpec {
        environment: request.environment,
        memory_bytes: (limits.memory_bytes != 0).then_some(limits.memory_bytes),
        cpu_millis: some(limits.cpu_millis),
        pids: some(limits.pids),
        disk_bytes: many(limits.writable_bytes),
        inodes: many(limits.inodes),
        open_files: some(limits.open_files),
        bandwidth: Bandwidth {
            read: many(limits.read_bytes_per_s),
            write: many(limits.write_bytes_per_s),
        },
        cpu_weight: some(limits.cpu_weight),
        processors: (!limits.cpuset.is_empty()).then_some(limits.cpuset),
        env: request.env,
        cwd: request.cwd,
        user: request.user,
        argv: request.argv,
        labels: request.labels.into_iter().collect(),
        idempotency_key: (!request.idempotency_key.is_empty()).then_some(request.idempotency_key),
        hostname: request.hostname,
        plane,
        network: NetworkRecord::read(request.network.unwrap_or_default())?,
        profile: protect::profile(&request.profile)?,
        protected: protect::paths(request.protected_paths)?,
        lifetime,
        lease_ms,
    })
}

fn rare_limits(limits: &v1::Limits) -> Result<()> {
    let bytes = limits.writable_bytes;
    if bytes != 0 && !(disk::MIN_BYTES..=disk::MAX_BYTES).contains(&bytes) {
        return Err(Error::invalid("a disk is between 16 MiB and 16 TiB"));
    }
    if limits.inodes > u64::from(u32::MAX) / 2 {
        return Err(Error::invalid("more inodes than a disk can have"));
    }
    if (1..MIN_OPEN_FILES).contains(&limits.open_files) {
        return Err(Error::invalid(format!("fewer than {MIN_OPEN_FILES} open files")));
    }
    if limits.cpu_weight > MAX_CPU_WEIGHT {
        return Err(Error::invalid(format!("a CPU weight is between 1 and {MAX_CPU_WEIGHT}")));
    }
    let is_list = |byte: u8| byte.is_ascii_digit() || byte == b',' || byte == b'-';
    if limits.cpuset.len() > MAX_CPUSET_BYTES || !limits.cpuset.bytes().all(is_list) {
        return Err(Error::invalid(format!(
            "processors are listed as in 0-3,6: {:?}",
            limits.cpuset
        )));
    }
    Ok(())
}

/// Checks what will be handed to execve(2).
pub fn strings(argv: &[String], env: &[String]) -> Result<()> {
    let mut total = 0;
    for text in argv.iter().chain(env) {
        if text.len() > MAX_STRING_BYTES {
            return Err(Error::invalid("an argument longer than 128 KiB"));
        }
        if text.contains('\0') {
            return Err(Error::invalid("a zero byte in an argument"));
        }
        total += text.len() + 1 + size_of::<usize>();
    }
    if total > MAX_STRINGS_BYTES {
        return Err(Error::invalid("arguments and environment longer than 1.5 MiB"));
    }
    match env.iter().find(|entry| entry.find('=').is_none_or(|at| at == 0)) {
        Some(entry) => Err(Error::invalid(format!("environment entry {entry:?} is not K=V"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> v1::CreateRequest {
        v1::CreateRequest { environment: "env/a:b".into(), ..v1::CreateRequest::default() }
    }

    #[test]
    fn bad_requests_are_refused_by_name() {
        let refuse = |change: &dyn Fn(&mut v1::CreateRequest)| {
            let mut bad = request();
            change(&mut bad);
            sandbox(bad).unwrap_err().kind()
        };
        assert_eq!(refuse(&|r| r.environment.clear()), ErrorKind::Invalid);
        assert_eq!(refuse(&|r| r.backend = 3), ErrorKind::Unsupported);
        assert_eq!(refuse(&|r| r.backend = 77), ErrorKind::Invalid);
        assert_eq!(refuse(&|r| r.hostname = Some("a b".into())), ErrorKind::Invalid);
        assert_eq!(refuse(&|r| r.env = vec!["=x".into()]), ErrorKind::Invalid);
        assert_eq!(refuse(&|r| r.argv = vec!["a\0".into()]), ErrorKind::Invalid);
        let limits: [&dyn Fn(&mut v1::Limits); 5] = [
            &|limits| limits.writable_bytes = 1,
            &|limits| limits.open_files = 3,
            &|limits| limits.cpu_weight = 10_001,
            &|limits| limits.cpuset = "0;1".into(),
            &|limits| limits.inodes = u64::MAX,
        ];
        for change in limits {
            let kind = refuse(&|request| {
                let mut limits = v1::Limits::default();
                change(&mut limits);
                request.limits = Some(limits);
            });
            assert_eq!(kind, ErrorKind::Invalid);
        }
        assert!(sandbox(request()).is_ok());
    }
}
