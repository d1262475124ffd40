//! A call, checked at the edge and trusted afterwards.

use crate::spec::{self, SandboxSpec};
use layer::{Error, Result};
use proto::v1;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

/// A call that names no time.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_TIMEOUT: Duration = Duration::from_secs(3600);
/// What one call may bring.
pub const MAX_INPUT_BYTES: u64 = 32 << 20;
/// What its answer may hold, of output and of files each.
const MAX_OUTPUT_BYTES: u64 = 16 << 20;
/// Fits, with both streams and files, into what clients take of one message unless told otherwise.
const DEFAULT_OUTPUT_BYTES: u64 = 1 << 20;
/// Files that a call brings, and patterns of those it asks back.
const MAX_FILES: usize = 256;
/// The kernel's own bound.
const MAX_PATH_BYTES: usize = 4095;

/// A validated call.
#[derive(Debug)]
pub struct Call {
    /// Environment, limits, command and what it starts from.
    pub spec: SandboxSpec,
    /// What the command reads.
    pub stdin: Vec<u8>,
    /// What lies there before it starts.
    pub files: Vec<v1::CallFile>,
    /// Paths and patterns of the files that are asked back.
    pub outputs: Vec<String>,
    /// How long it may take.
    pub timeout: Duration,
    /// Bytes of each stream that are kept.
    pub output_limit: u64,
    /// Bytes of all files that are asked back.
    pub files_limit: u64,
}

impl Call {
    /// Bytes that it holds at most.
    pub fn bytes(&self) -> u64 {
        let files: usize = self.files.iter().map(|file| file.data.len()).sum();
        let asked = if self.outputs.is_empty() { 0 } else { self.files_limit };
        (self.stdin.len() + files) as u64 + 2 * self.output_limit + asked
    }
}

/// Validates a call.
pub fn call(request: v1::CallRequest) -> Result<Call> {
    if request.argv.is_empty() {
        return Err(Error::invalid("no command is given"));
    }
    if request.files.len() > MAX_FILES || request.outputs.len() > MAX_FILES {
        return Err(Error::invalid(format!("more than {MAX_FILES} files")));
    }
    for path in request.files.iter().map(|file| &file.path).chain(&request.outputs) {
        check_path(path)?;
    }
    let bytes = |limit: u64, what: &str| match limit {
        0 => Ok(DEFAULT_OUTPUT_BYTES),
        limit if limit <= MAX_OUTPUT_BYTES => Ok(limit),
        _ => Err(Error::invalid(format!("{what}: {} MiB at most", MAX_OUTPUT_BYTES >> 20))),
    };
    let output_limit = bytes(request.output_limit_bytes, "kept output")?;
    let files_limit = bytes(request.files_limit_bytes, "files asked back")?;
    let timeout = match request.timeout_ms {
        0 => DEFAULT_TIMEOUT,
        millis => Duration::from_millis(millis),
    };
    if timeout > MAX_TIMEOUT {
        return Err(Error::invalid("a call takes an hour at most; a sandbox may take longer"));
    }
    let files: usize = request.files.iter().map(|file| file.data.len()).sum();
    if (request.stdin.len() + files) as u64 > MAX_INPUT_BYTES {
        let most = MAX_INPUT_BYTES >> 20;
        return Err(Error::invalid(format!("input and files of a call: {most} MiB at most")));
    }
    let spec = spec::sandbox(v1::CreateRequest {
        environment: request.environment,
        limits: request.limits,
        env: request.env,
        cwd: request.cwd,
        user: request.user,
        argv: request.argv,
        ..v1::CreateRequest::default()
    })?;
    let (stdin, files, outputs) = (request.stdin, request.files, request.outputs);
    Ok(Call { spec, stdin, files, outputs, timeout, output_limit, files_limit })
}

fn check_path(path: &str) -> Result<()> {
    let is_plain = |part: Component<'_>| !matches!(part, Component::ParentDir);
    if path.is_empty() || path.len() > MAX_PATH_BYTES || path.contains('\0') {
        return Err(Error::invalid(format!("no path of a file: {path:?}")));
    }
    if !Path::new(path).components().all(is_plain) {
        return Err(Error::invalid(format!("a path of a call has no `..`: {path:?}")));
    }
    Ok(())
}

/// Where a path of a call lies: below the working directory unless it is absolute.
pub fn place(cwd: &str, path: &str) -> PathBuf {
    Path::new("/").join(cwd).join(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer::ErrorKind;

    #[test]
    fn bad_calls_are_refused() {
        let good = || v1::CallRequest {
            environment: "env/a:b".into(),
            argv: vec!["true".into()],
            ..v1::CallRequest::default()
        };
        assert!(call(good()).is_ok());
        let file = |path: &str| v1::CallFile { path: path.into(), ..v1::CallFile::default() };
        let refuse = |change: &dyn Fn(&mut v1::CallRequest)| {
            let mut bad = good();
            change(&mut bad);
            call(bad).unwrap_err().kind()
        };
        let bad: [&dyn Fn(&mut v1::CallRequest); 8] = [
            &|call| call.argv.clear(),
            &|call| call.files = vec![file("/a/../../b")],
            &|call| call.files = vec![file("")],
            &|call| call.outputs = vec!["..".into()],
            &|call| call.files = vec![file("a"); MAX_FILES + 1],
            &|call| call.stdin = vec![0; MAX_INPUT_BYTES as usize + 1],
            &|call| call.output_limit_bytes = MAX_OUTPUT_BYTES + 1,
            &|call| call.timeout_ms = 3_600_001,
        ];
        for change in bad {
            assert_eq!(refuse(change), ErrorKind::Invalid);
        }
    }

    #[test]
    fn paths_lie_below_the_working_directory() {
        assert_eq!(place("/work", "a/b"), Path::new("/work/a/b"));
        assert_eq!(place("work", "/a"), Path::new("/a"));
        assert_eq!(place("", "a"), Path::new("/a"));
    }
}
