//! The backend alone, over a folder with busybox in it.

use super::*;
use crate::plan::PlannedLimits;
use std::io::Read;

struct World {
    folder: tempfile::TempDir,
    groups: PathBuf,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image/bin");
        std::fs::create_dir_all(&image).unwrap();
        for name in ["busybox", "sh", "true", "cat", "ls"] {
            std::fs::copy("/usr/bin/busybox", image.join(name)).unwrap();
        }
        let name = folder.path().file_name().unwrap().to_string_lossy().into_owned();
        Self { folder, groups: Path::new("lamella-unit").join(name) }
    }

    async fn backend(&self) -> Container {
        let path = |name: &str| self.folder.path().join(name);
        let (slots, skeleton, templates) = (path("slots"), path("skeleton"), path("templates"));
        let (groups, users) = (self.groups.clone(), UserNamespaces::Required);
        let config = ContainerConfig { slots, templates, skeleton, groups, users };
        Container::open(config).await.unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let hierarchies = Hierarchies::detect().unwrap();
        let group = hierarchies.group(&self.groups);
        let _gone = group.kill();
        for _ in 0..100 {
            if group.remove().is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn plan() -> LaunchPlan {
    let limits = PlannedLimits {
        memory_bytes: 64 << 20,
        pids: 64,
        cpu_millis: Some(1000),
        ..PlannedLimits::default()
    };
    crate::plan::launch(&crate::spec::SandboxSpec::default(), &limits, "unit")
}

async fn output(instance: &dyn Instance, argv: &[&str]) -> (Option<sys::process::Exit>, String) {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let command =
        Command { argv: argv.iter().map(|&word| word.to_owned()).collect(), ..Command::default() };
    let streams = [null.as_fd(), writer.as_fd(), writer.as_fd()];
    let started = instance.exec(command, &streams).await.unwrap();
    drop(writer);
    match started.start {
        CommandStart::Refused(code, text) => (Some(sys::process::Exit::Code(code)), text),
        CommandStart::Started(mut command) => {
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            (command.process.wait().await, text)
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_runs_commands_and_leaves_nothing() {
    let world = World::new();
    let backend = world.backend().await;
    let layers = [world.folder.path().join("image")];
    for _ in 0..3 {
        let instance = backend.launch(&plan(), &layers).await.unwrap();
        let zero = Some(sys::process::Exit::Code(0));
        assert_eq!(output(&*instance, &["true"]).await, (zero, String::new()));
        let (exit, text) = output(&*instance, &["sh", "-c", "echo $$; ls /; exit 3"]).await;
        assert_eq!(exit, Some(sys::process::Exit::Code(3)), "{text}");
        let (exit, text) = output(&*instance, &["missing"]).await;
        assert_eq!(exit, Some(sys::process::Exit::Code(127)), "{text}");
        instance.kill().unwrap();
        instance.ended().await;
        instance.release().await;
    }
    backend.close().await;
    let hierarchies = Hierarchies::detect().unwrap();
    assert!(!hierarchies.group(&world.groups).exists());
    assert_eq!(std::fs::read_dir(world.folder.path().join("slots")).unwrap().count(), 0);
}
