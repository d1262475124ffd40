//! `call`: one command in a container that is gone afterwards, with files in and out.

use super::exec::{end_with, explain, print};
use super::sandboxes::show_end;
use super::{Scene, lost_name, named};
use crate::args::Call;
use crate::errors::{Outcome, Remedy};
use crate::node::start::{self, Lifetime};
use layer::{Context, Error, ErrorKind, Result};
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::{CallFile, CallRequest, CallResponse, Limits};
use serde::Serialize;
use std::io::{self, IsTerminal, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// What a call may bring, input and files together; the node says no to more.
const MAX_INPUT_BYTES: u64 = 32 << 20;
/// What an answer may hold: both streams, the files, and what is around them.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// How a call ended.
#[derive(Debug, Serialize)]
struct Ended {
    end: String,
    exit_code: i32,
    message: String,
    stdout: String,
    stderr: String,
    stdout_truncated_bytes: u64,
    stderr_truncated_bytes: u64,
    files: Vec<String>,
    wall_us: u64,
    cpu_us: u64,
    max_memory_bytes: u64,
}

/// `call`
pub async fn call(scene: &Scene, args: Call) -> Outcome {
    let request = request(&args)?;
    let node = start::connect(&scene.settings, Lifetime::WhileUsed, scene.out).await?;
    let client = SandboxesClient::new(node.channel.clone());
    let mut client = client.max_decoding_message_size(MAX_ANSWER_BYTES);
    let answer = client.call(request).await.remedy(lost_name)?.into_inner();
    let written = write_all(&answer.files, &args.outputs);
    let code = u8::try_from(answer.exit_code).unwrap_or(1);
    if scene.out.is_json() {
        let ended = ended(answer, written.as_deref().unwrap_or_default());
        scene.out.result(&ended, String::new)?;
    } else {
        show(scene, &answer)?;
    }
    written?;
    end_with(code)
}

fn show(scene: &Scene, answer: &CallResponse) -> Outcome {
    print(&mut io::stdout().lock(), &answer.stdout)?;
    print(&mut io::stderr().lock(), &answer.stderr)?;
    let cut = answer.stdout_truncated_bytes + answer.stderr_truncated_bytes;
    if cut > 0 {
        scene.out.notice(&format!("{cut} bytes of output were cut; --output-limit gives more"));
    }
    match answer.end.as_ref().and_then(|end| end.how.as_ref()) {
        Some(how) if answer.message.is_empty() => explain(how, scene.out),
        _ if answer.message.is_empty() => {}
        _ => scene.out.notice(&answer.message),
    }
    Ok(())
}

fn ended(answer: CallResponse, written: &[PathBuf]) -> Ended {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let usage = answer.usage.unwrap_or_default();
    Ended {
        end: answer.end.as_ref().map(show_end).unwrap_or_default(),
        exit_code: answer.exit_code,
        message: answer.message,
        stdout: text(&answer.stdout),
        stderr: text(&answer.stderr),
        stdout_truncated_bytes: answer.stdout_truncated_bytes,
        stderr_truncated_bytes: answer.stderr_truncated_bytes,
        files: written.iter().map(|path| path.display().to_string()).collect(),
        wall_us: usage.wall_us,
        cpu_us: usage.cpu_us,
        max_memory_bytes: usage.max_memory_bytes,
    }
}

fn request(args: &Call) -> Outcome<CallRequest> {
    let files = args.files.iter().map(|(host, path)| read(host, path));
    Ok(CallRequest {
        environment: named(&args.reference)?,
        argv: args.argv.clone(),
        env: args.process.env.clone(),
        cwd: args.process.cwd.clone(),
        user: args.process.user.clone(),
        stdin: standard_input()?,
        files: files.collect::<Result<_>>()?,
        outputs: args.outputs.iter().map(|(path, _)| path.clone()).collect(),
        limits: Some(Limits {
            memory_bytes: args.memory.unwrap_or(0),
            cpu_millis: args.cpus.unwrap_or(0),
            pids: args.pids.unwrap_or(0),
            writable_bytes: args.disk.unwrap_or(0),
            ..Limits::default()
        }),
        timeout_ms: args.timeout.map_or(0, |time| time.as_millis() as u64),
        output_limit_bytes: args.output_limit.unwrap_or(0),
        files_limit_bytes: args.files_limit.unwrap_or(0),
    })
}

/// All of it, unless it is a terminal: whoever sits there is not waited for.
fn standard_input() -> Result<Vec<u8>> {
    let input = io::stdin();
    if input.is_terminal() {
        return Ok(Vec::new());
    }
    bounded(input.lock(), "standard input")
}

fn bounded(from: impl Read, what: &str) -> Result<Vec<u8>> {
    let mut data = Vec::new();
    let read = from.take(MAX_INPUT_BYTES + 1).read_to_end(&mut data);
    read.context(|| format!("read {what}"))?;
    if data.len() as u64 > MAX_INPUT_BYTES {
        let text = format!("{what}: a call takes {} MiB at most", MAX_INPUT_BYTES >> 20);
        return Err(Error::invalid(text));
    }
    Ok(data)
}

fn read(host: &Path, path: &str) -> Result<CallFile> {
    let context = || format!("open {}", host.display());
    let file = std::fs::File::open(host).context(context)?;
    let mode = file.metadata().context(context)?.permissions().mode() & 0o777;
    let data = bounded(file, &host.display().to_string())?;
    Ok(CallFile { path: path.to_owned(), mode, data, error: String::new() })
}

/// Writes what came back; the paths that were written. The first that did not come back is the error, after the
/// others were written.
fn write_all(files: &[CallFile], outputs: &[(String, PathBuf)]) -> Result<Vec<PathBuf>> {
    let (mut written, mut missing) = (Vec::new(), None);
    for file in files {
        if !file.error.is_empty() {
            let text = format!("{:?} does not come back: {}", file.path, file.error);
            missing.get_or_insert(Error::new(ErrorKind::Invalid, text));
            continue;
        }
        let Some(target) = target(file, outputs) else { continue };
        write(&target, file).context(|| format!("write {}", target.display()))?;
        written.push(target);
    }
    missing.map_or(Ok(written), Err)
}

/// Where a file goes: to the place that was named with its path, or below the folder that was named with the
/// pattern. Names come from the sandbox: only the last part of one counts.
fn target(file: &CallFile, outputs: &[(String, PathBuf)]) -> Option<PathBuf> {
    let name = Path::new(&file.path).file_name()?;
    let is_pattern = |path: &str| path.contains(['*', '?']);
    let literal = outputs.iter().find(|(path, _)| {
        !is_pattern(path) && Path::new(&file.path).ends_with(path.trim_start_matches('/'))
    });
    match literal {
        Some((_, host)) if host.is_dir() => Some(host.join(name)),
        Some((_, host)) => Some(host.clone()),
        None => outputs.iter().find(|(path, _)| is_pattern(path)).map(|(_, host)| host.join(name)),
    }
}

/// A new file takes the place of what is there, so that no link is followed.
fn write(target: &Path, file: &CallFile) -> io::Result<()> {
    if let Some(parent) = target.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent)?;
    }
    match std::fs::remove_file(target) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut how = std::fs::OpenOptions::new();
    let mut to = how.write(true).create_new(true).mode(file.mode & 0o777).open(target)?;
    io::Write::write_all(&mut to, &file.data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_back_goes_where_it_was_asked_to() {
        let file = |path: &str| CallFile { path: path.into(), ..CallFile::default() };
        let outputs = [
            ("/work/a.out".to_owned(), PathBuf::from("/host/prog")),
            ("*.txt".to_owned(), PathBuf::from("/host/texts")),
        ];
        let place = |path: &str| target(&file(path), &outputs);
        assert_eq!(place("/work/a.out"), Some("/host/prog".into()));
        assert_eq!(place("/work/b.txt"), Some("/host/texts/b.txt".into()));
        // Nothing that a sandbox names leads out of the folder.
        assert_eq!(place("/x/.."), None);
    }
}
