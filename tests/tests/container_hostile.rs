//! Ways out of a container that were open once, and ways to hurt the node from inside.

#![allow(clippy::unwrap_used)]

mod runtime_world;

use anyhow::{Result, ensure};
use proto::v1::*;
use runtime_world::{World, how};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

/// The first numbers of descriptors that a process of ours might hold.
const DESCRIPTORS: std::ops::Range<u32> = 3..40;

fn command(id: &str, argv: &[&str]) -> ExecStart {
    ExecStart {
        sandbox_id: id.into(),
        argv: argv.iter().map(|&word| word.into()).collect(),
        ..ExecStart::default()
    }
}

/// A starting command once held folders of the host's cgroups, and `..` led from there to its root.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_working_directory_never_leads_to_a_descriptor_of_ours() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    for number in DESCRIPTORS {
        let link = format!("ln -sfn /proc/self/fd/{number} /tmp/link");
        client.shell(&id, &link).await?;
        for cwd in [format!("/proc/self/fd/{number}"), "/tmp/link".to_owned()] {
            for tty in [false, true] {
                let start = ExecStart { cwd: Some(cwd.clone()), tty, ..command(&id, &["true"]) };
                let ran = client.exec(start).await?;
                assert_eq!(ran.ended.exit_code, 126, "{cwd}: {:?}", ran.ended);
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_interpreter_or_command_is_found_through_a_descriptor_of_ours() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let up = "../".repeat(12);
    for number in DESCRIPTORS {
        let target = format!("/proc/self/fd/{number}/{up}bin/true");
        let script = format!("printf '#!{target}\\n' > /tmp/script; chmod +x /tmp/script");
        client.shell(&id, &script).await?;
        for argv in ["/tmp/script", target.as_str()] {
            let ran = client.run(&id, &[argv]).await?;
            assert_ne!(ran.ended.exit_code, 0, "{argv} by descriptor {number}");
        }
    }
    Ok(())
}

/// The mode of /dev/null of the host, put back whatever happens.
struct NullMode(u32);

impl NullMode {
    fn now() -> Result<u32> {
        Ok(std::fs::metadata("/dev/null")?.permissions().mode() & 0o7777)
    }
}

impl Drop for NullMode {
    fn drop(&mut self) {
        let permissions = std::fs::Permissions::from_mode(self.0);
        let _as_before = std::fs::set_permissions("/dev/null", permissions);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn standard_input_changes_nothing_of_the_host() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let before = NullMode(NullMode::now()?);
    // Another mode that hurts nobody, should it be set after all.
    let line = "exec 3<&0; chmod 0664 /proc/self/fd/3 || chmod 0664 /proc/$$/fd/0";
    let ran = client.run(&id, &["sh", "-c", line]).await?;
    assert_ne!(ran.ended.exit_code, 0);
    let own = CreateRequest {
        argv: ["sh", "-c", line].map(str::to_owned).to_vec(),
        ..CreateRequest::default()
    };
    let own = client.create(own).await?;
    let ended = client.wait(&own.id).await?;
    assert!(!matches!(how(&ended.end), Some(end::How::Exited(0))), "{:?}", ended.end);
    assert_eq!(NullMode::now()?, before.0);
    // It is still an input that ends at once.
    assert_eq!(client.shell(&id, "cat | wc -c").await?.trim(), "0");
    Ok(())
}

/// SIGSTOP cannot be blocked, and a process that is being started is of the same user.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_that_is_stopped_at_its_birth_shows_nothing_and_ends_by_its_timeout() -> Result<()>
{
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    // Stops every process that it does not know, waits until it stands, and prints the sockets that this
    // one can see.
    let hunt = "known=' '; for p in /proc/[0-9]*; do known=\"$known${p#/proc/} \"; done; \
                touch /tmp/ready; \
                while [ ! -e /tmp/enough ]; do for p in /proc/[0-9]*; do n=${p#/proc/}; \
                case \"$known\" in *\" $n \"*) continue;; esac; \
                kill -STOP $n 2>/dev/null || continue; known=\"$known$n \"; \
                while grep -q '^State:.[RSD]' $p/status 2>/dev/null; do :; done; \
                if grep -q zygote $p/comm 2>/dev/null; then echo caught; \
                tail -n +2 $p/net/unix; ls $p/cwd/ $p/root/ $p/fd/3/ 2>/dev/null; fi; \
                done; done";
    let hunting = client.exec(command(&id, &["sh", "-c", hunt]));
    let tried = async {
        let ready = || ReadFileRequest {
            id: id.clone(),
            path: "/tmp/ready".into(),
            ..ReadFileRequest::default()
        };
        while client.inner.clone().read_file(ready()).await?.into_inner().message().await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let mut late = 0;
        for _ in 0..20 {
            let start = ExecStart { timeout_ms: 300, ..command(&id, &["true"]) };
            let since = Instant::now();
            let ran = client.exec(start).await?;
            ensure!(since.elapsed() < Duration::from_secs(20), "the time-out did not count");
            late += u32::from(matches!(how(&ran.ended.end), Some(end::How::Timeout(_))));
        }
        let target = WriteFileStart {
            id: id.clone(),
            path: "/tmp/enough".into(),
            mode: 0o644,
            ..WriteFileStart::default()
        };
        let part = WriteFilePart { part: Some(write_file_part::Part::Start(target)) };
        client.inner.clone().write_file(tokio_stream::iter([part])).await?;
        anyhow::Ok(late)
    };
    let (hunted, late) = tokio::join!(hunting, tried);
    let (text, late) = (hunted?.text(), late?);
    assert!(text.lines().all(|line| line == "caught"), "a starting command showed {text}");
    // Each that was caught ended by its time-out, and none stays behind.
    assert!(text.lines().count() <= late as usize, "{late} {text}");
    let left = "grep -l zygote /proc/[0-9]*/comm 2>/dev/null | wc -l";
    assert_eq!(client.shell(&id, left).await?.trim(), "0");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_may_take_a_part_only_of_what_the_kernel_counts_by_user() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let limits = std::fs::read_to_string("/proc/self/limits")?;
    let inside = client.shell(&id, "cat /proc/self/limits").await?;
    for name in ["Max pending signals", "Max msgqueue size"] {
        let hard = |text: &str| -> Result<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            Ok(line.split_whitespace().nth(1).unwrap_or_default().parse()?)
        };
        assert!(hard(&inside)? <= hard(&limits)? / 4, "{name}: {inside}");
    }
    Ok(())
}

/// The one that starts must not follow what it could with our rights: into the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_starting_command_is_not_led_through_another_that_was_stopped() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let hunt = "known=' '; for p in /proc/[0-9]*; do known=\"$known${p#/proc/} \"; done; \
                while :; do for p in /proc/[0-9]*; do n=${p#/proc/}; \
                case \"$known\" in *\" $n \"*) continue;; esac; \
                kill -STOP $n 2>/dev/null || continue; \
                while grep -q '^State:.[RSD]' $p/status 2>/dev/null; do :; done; \
                if grep -q zygote $p/comm 2>/dev/null; then echo $n > /tmp/caught; exit; fi; \
                kill -CONT $n 2>/dev/null; known=\"$known$n \"; done; done";
    let hunting = ExecStart { timeout_ms: 60_000, ..command(&id, &["sh", "-c", hunt]) };
    let hunter = client.clone();
    let mut hunting = tokio::spawn(async move { hunter.exec(hunting).await });
    let mut baits = 0;
    let bait = loop {
        let (start, baited) = (command(&id, &["true"]), client.clone());
        let mut bait = tokio::spawn(async move { baited.exec(start).await });
        baits += 1;
        tokio::select! {
            // It became its command before it was stopped.
            ended = &mut bait => drop(ended??),
            hunted = &mut hunting => {
                let ended = hunted??.ended;
                assert_eq!(ended.exit_code, 0, "after {baits} commands: {ended:?}");
                break bait;
            }
        }
    };
    let caught = client.shell(&id, "cat /tmp/caught").await?;
    let pid = caught.trim();
    for place in ["root", "cwd", "fd/3", "fd/4", "fd/5", "fd/6", "fd/7", "fd/8", "fd/9"] {
        let cwd = Some(format!("/proc/{pid}/{place}"));
        let ran = client.exec(ExecStart { cwd, ..command(&id, &["true"]) }).await?;
        assert_eq!(ran.ended.exit_code, 126, "{place}: {:?}", ran.ended);
    }
    client.shell(&id, &format!("kill -CONT {pid}")).await?;
    bait.await??;
    Ok(())
}
