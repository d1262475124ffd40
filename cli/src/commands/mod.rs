//! One module per group of commands, and the dispatch to them.

mod bench;
mod build;
mod cache;
mod call;
mod check;
mod compose;
mod containerd;
mod copy;
mod diff;
mod doctor;
mod events;
mod exec;
mod files;
mod gc;
mod images;
mod lifetime;
mod materialise;
mod mend;
mod mount;
mod network;
mod node;
mod oci;
mod overlay_view;
mod pack;
mod profile;
mod run;
mod running;
mod sandboxes;
mod sign;
mod stats;
mod top;
mod transfer;
mod tree;

pub use bench::bench;
pub use doctor::doctor;
pub use mount::any as any_mount;
pub use node::{keeper, virtiofs};

use crate::args::{Action, Containerd, Env, Oci};
use crate::errors::{Failure, Outcome};
use crate::output::Output;
use crate::settings::Settings;
use layer::reference::{RefKind, Reference};
use layer::{Error, ErrorKind, LayerId};
use tonic::transport::Channel;

/// What every command works with.
#[derive(Debug, Clone)]
pub struct Scene {
    /// Where things lie.
    pub settings: Settings,
    /// Where results go.
    pub out: Output,
}

/// Takes back every mount and stops every sandbox.
pub async fn stop_everything(settings: &Settings, out: Output, sandboxes: &Channel) -> Outcome {
    let stopped = node::stop_all(sandboxes).await.map(|_| ());
    mount::unmount_all(settings, out).await?;
    stopped
}

/// Carries out a command that needs a runtime; `main` carries out the others.
pub async fn dispatch(scene: Scene, action: Action) -> Outcome {
    match action {
        Action::Up(args) => node::up(&scene, &args).await,
        Action::Down(args) => node::down(&scene, &args).await,
        Action::Upgrade => node::upgrade(&scene).await,
        Action::Build(args) => build::build(&scene, args).await,
        Action::Pull(args) => build::pull(&scene, args).await,
        Action::Oci(Oci::Export(args)) => oci::export(&scene, args).await,
        Action::Oci(Oci::Referrers(args)) => oci::referrers(&scene, args).await,
        Action::Containerd(Containerd::Add(args)) => containerd::add(&scene, args).await,
        Action::Snapshotter(args) => containerd::snapshotter(&scene, args).await,
        Action::Env(Env::Create(args)) => compose::create(&scene, args).await,
        Action::Ls(args) => images::ls(&scene, &args).await,
        Action::Inspect(args) => images::inspect(&scene, &args).await,
        Action::Tree(args) => tree::tree(&scene, &args).await,
        Action::History(args) => images::history(&scene, &args).await,
        Action::Tag(args) => images::tag(&scene, &args).await,
        Action::Untag(args) => images::untag(&scene, &args).await,
        Action::Mount(args) => mount::mount(&scene, &args).await,
        Action::Umount(args) => mount::umount(&scene, &args).await,
        Action::Run(args) => run::run(&scene, args).await,
        Action::Create(args) => sandboxes::create(&scene, args).await,
        Action::Call(args) => call::call(&scene, args).await,
        Action::Exec(args) => exec::exec(&scene, args).await,
        Action::Commands(args) => running::commands(&scene, args).await,
        Action::Attach(args) => running::attach(&scene, args).await,
        Action::Tail(args) => running::tail(&scene, args).await,
        Action::Signal(args) => running::signal(&scene, args).await,
        Action::Wait(args) => running::wait(&scene, args).await,
        Action::Files(args) => files::files(&scene, args).await,
        Action::Cp(args) => copy::copy(&scene, &args).await,
        Action::Ps(args) => sandboxes::ps(&scene, &args).await,
        Action::Logs(args) => sandboxes::logs(&scene, &args).await,
        Action::Events(args) => events::events(&scene, args).await,
        Action::Top(args) => top::top(&scene, args).await,
        Action::Stop(args) => sandboxes::stop(&scene, &args).await,
        Action::Rm(args) => sandboxes::rm(&scene, &args).await,
        Action::Pause(args) => sandboxes::pause(&scene, &args).await,
        Action::Resume(args) => sandboxes::resume(&scene, &args).await,
        Action::Fork(args) => lifetime::fork(&scene, args).await,
        Action::RenewOwner(args) => lifetime::renew_owner(&scene, args).await,
        Action::Net(args) => network::net(&scene, args).await,
        Action::PackDiff(args) => pack::pack_diff(&scene, args).await,
        Action::Prefetch(args) => profile::prefetch(&scene, &args).await,
        Action::Profile(action) => profile::profile(&scene, action).await,
        Action::Stats => stats::stats(&scene).await,
        Action::Pin(args) => cache::pin(&scene, &args.reference, true, args.load).await,
        Action::Unpin(args) => cache::pin(&scene, &args.reference, false, false).await,
        Action::Fsck(args) => check::fsck(&scene, &args).await,
        Action::Materialise(args) => materialise::materialise(&scene, &args).await,
        Action::Reindex => images::reindex(&scene).await,
        Action::Repair(args) => mend::repair(&scene, &args).await,
        Action::Diff(args) => diff::diff(&scene, &args).await,
        Action::CopyStore(args) => transfer::copy_store(&scene, args).await,
        Action::Export(args) => transfer::export(&scene, args).await,
        Action::Import(args) => transfer::import(&scene, args).await,
        Action::Gc(args) => gc::gc(&scene, &args).await,
        Action::Key(action) => sign::key(&scene, action),
        Action::Sign(args) => sign::sign(&scene, args).await,
        Action::Verify(args) => sign::verify(&scene, args).await,
        Action::Fsd(options) => node::fsd(&scene, &options).await,
        Action::Doctor | Action::Bench(_) | Action::Keeper(_) | Action::Virtiofs(_) => {
            Err(Error::new(ErrorKind::Internal, "a command without a runtime was given one").into())
        }
    }
}

/// Does something on a thread that may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Outcome<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| {
        Error::new(ErrorKind::Internal, "a thread of the command died").with_source(error).into()
    })
}

/// Whether this text is the id of a layer or an environment.
fn is_id(text: &str) -> bool {
    text.parse::<LayerId>().is_ok()
}

/// The full name of what the user means: an id as it is, `kind/name:tag`, and `env/` before a name
/// without a kind.
fn named(text: &str) -> Outcome<String> {
    if is_id(text) {
        return Ok(text.to_owned());
    }
    reference(text).map(|reference| reference.to_string())
}

fn has_kind(text: &str) -> bool {
    text.split_once('/')
        .is_some_and(|(kind, rest)| kind.parse::<RefKind>().is_ok() && !rest.is_empty())
}

/// A reference; one without a kind is an environment's.
fn reference(text: &str) -> Outcome<Reference> {
    let full = if has_kind(text) { text.to_owned() } else { format!("env/{text}") };
    full.parse::<Reference>()
        .map_err(|error| Failure::Usage(format!("{text:?}: {}", crate::errors::innermost(&error))))
}

/// A reference whose kind is spelled out, because it decides about what is made.
fn reference_with_kind(text: &str) -> Outcome<Reference> {
    if has_kind(text) {
        return reference(text);
    }
    let kinds = RefKind::ALL.map(|kind| format!("{kind}/{text}")).join(", ");
    Err(Failure::Usage(format!("{text:?} names no kind; write one of {kinds}")))
}

/// What to say when a name is unknown.
fn lost_name(error: &Error) -> Option<String> {
    (error.kind() == ErrorKind::NotFound).then(|| "`lamella ls` lists what there is".to_owned())
}

/// Who moves a reference.
fn author() -> String {
    let user = ["LAMELLA_AUTHOR", "SUDO_USER", "USER"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{}@{host}", user.unwrap_or_else(|| "root".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_the_kind_decides_it_has_to_be_named() {
        assert_eq!(reference_with_kind("env/py").unwrap().to_string(), "env/py:latest");
        for bad in ["bad", "ci/py:3", "base/"] {
            let Err(Failure::Usage(why)) = reference_with_kind(bad) else { panic!("{bad}") };
            assert!(why.contains("toolkit/") && why.contains("env/"), "{why}");
        }
    }

    #[test]
    fn a_name_without_a_kind_is_an_environment() {
        assert_eq!(named("py").unwrap(), "env/py:latest");
        assert_eq!(named("ci/py:3").unwrap(), "env/ci/py:3");
        assert_eq!(named("base/debian:13").unwrap(), "base/debian:13");
        let id = "ab".repeat(32);
        assert_eq!(named(&id).unwrap(), id);
        for bad in ["", "base/", "UPPER", "base/x:y:z", "../x", "a b"] {
            assert!(matches!(named(bad), Err(Failure::Usage(_))), "{bad}");
        }
    }
}
