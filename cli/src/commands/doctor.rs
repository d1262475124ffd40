//! `doctor`: what this host can do, and why not more.
//!
//! Every capability is tried once, on scratch objects that are gone afterwards; planes and backends
//! follow from them. Nothing is created for the node; control groups that killed keepers left are removed.

use super::Scene;
use crate::errors::Outcome;
use crate::output::{Row, write_out};
use fsd::PlaneKind;
use layer::{Error, ErrorKind};
use serde::Serialize;
use std::path::{Path, PathBuf};
use sys::probe::{Capabilities, Capability, Finding};

/// A plane or a backend, and what it stands on.
struct Offer {
    name: &'static str,
    /// `None`: not in this version.
    needs: Option<&'static [Capability]>,
}

const BACKENDS: [Offer; 4] = [
    Offer {
        name: "container",
        needs: Some(&[
            Capability::OverlayDescriptors,
            Capability::Pidfd,
            Capability::MemfdSeals,
            Capability::Seccomp,
            Capability::CgroupMemory,
            Capability::CgroupPids,
            Capability::CgroupFreezer,
        ]),
    },
    Offer { name: "fncall", needs: None },
    Offer { name: "microvm", needs: None },
    Offer { name: "vm", needs: None },
];

#[derive(Debug, Serialize)]
struct Diagnosis {
    kernel: String,
    machine: String,
    data: PathBuf,
    store: String,
    /// For a store on 3FS: whether long reads go by its rings.
    #[serde(skip_serializing_if = "Option::is_none")]
    usrbio: Option<Verdict>,
    planes: Vec<Verdict>,
    backends: Vec<Verdict>,
    capabilities: Vec<Line>,
    /// Groups of keepers that were killed, which are gone now.
    #[serde(skip_serializing_if = "is_zero")]
    removed_keeper_groups: usize,
}

// The signature is serde's.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// Whether a plane or a backend can be used here.
#[derive(Debug, Serialize)]
struct Verdict {
    name: &'static str,
    available: bool,
    why_not: Option<String>,
    /// For what, where it is not for everything.
    only_for: Option<&'static str>,
}

impl Verdict {
    fn of(offer: &Offer, capabilities: &Capabilities) -> Self {
        let why_not = match offer.needs {
            None => Some("not in this version".to_owned()),
            Some(needs) => capabilities.first_missing(needs).map(|missing| {
                format!("{missing} is missing: {}", detail(capabilities.finding(missing)))
            }),
        };
        Self { name: offer.name, available: why_not.is_none(), why_not, only_for: None }
    }

    fn line(&self) -> String {
        match &self.why_not {
            None => match self.only_for {
                Some(what) => format!("  {:<16}yes  for {what}", self.name),
                None => format!("  {:<16}yes", self.name),
            },
            Some(why) => format!("  {:<16}no   {why}", self.name),
        }
    }
}

/// The planes, the best first.
fn planes(capabilities: &Capabilities, store_url: &str) -> Vec<Verdict> {
    let verdict = |kind: PlaneKind| {
        let offer = Offer { name: kind.name(), needs: Some(kind.needs()) };
        let mut verdict = Verdict::of(&offer, capabilities);
        if !kind.serves_every_layer() {
            verdict.only_for = Some("layers that `lamella materialise` laid out on the store");
            if !is_mounted(store_url) {
                verdict.available = false;
                verdict.why_not.get_or_insert(format!("the store {store_url} is no directory"));
            }
        }
        verdict
    };
    // Its guests read what fsd exports over FUSE.
    let virtiofs = Offer { name: "virtiofs", needs: Some(PlaneKind::Fuse.needs()) };
    let guests = Some("virtual machines, through a vhost-user socket");
    let virtiofs = Verdict { only_for: guests, ..Verdict::of(&virtiofs, capabilities) };
    PlaneKind::ALL.into_iter().map(verdict).chain([virtiofs]).collect()
}

/// Whether a store on 3FS is read by USRBIO.
fn usrbio(store_url: &str) -> Option<Verdict> {
    let why_not = store::usrbio(store_url)?.err().map(|error| {
        format!("{}: reads go through the 3FS mount; install 3FS's client library", error.chain())
    });
    Some(Verdict { name: "usrbio", available: why_not.is_none(), why_not, only_for: None })
}

/// Whether the store is a directory that the kernel reads by itself, not slowed down or broken on purpose.
fn is_mounted(store_url: &str) -> bool {
    let place = ["file://", "3fs://"].iter().find_map(|scheme| store_url.strip_prefix(scheme));
    let place = place.unwrap_or(store_url);
    place.starts_with('/') && !place.contains('?')
}

/// One capability.
#[derive(Debug, Serialize)]
struct Line {
    name: &'static str,
    #[serde(flatten)]
    finding: Finding,
}

impl Row for Line {
    const HEADER: &'static [&'static str] = &["CAPABILITY", "HERE", "DETAIL"];

    fn cells(&self) -> Vec<String> {
        let here = match &self.finding {
            Finding::Available { .. } => "yes",
            Finding::Missing { .. } => "no",
            Finding::Untested { .. } => "?",
        };
        vec![self.name.to_owned(), here.to_owned(), detail(Some(&self.finding))]
    }
}

fn detail(finding: Option<&Finding>) -> String {
    match finding {
        Some(Finding::Available { detail }) => detail.clone(),
        Some(Finding::Missing { reason, remedy, .. }) => format!("{reason}; remedy: {remedy}"),
        Some(Finding::Untested { why }) => format!("not tried: {why}"),
        None => "not tried".to_owned(),
    }
}

/// The nearest folder that exists: its file system is the one that the data will lie on.
fn scratch(data: &Path) -> Option<&Path> {
    data.ancestors().find(|path| path.is_dir())
}

/// `doctor`
pub fn doctor(scene: &Scene) -> Outcome {
    let data = scene.settings.data();
    let Some(scratch) = scratch(data) else {
        let text = format!("no folder above {} exists", data.display());
        return Err(Error::new(ErrorKind::NotFound, text).into());
    };
    if !rustix::process::geteuid().is_root() {
        scene.out.notice("not run as root: much of this is missing for that reason alone");
    }
    let capabilities = Capabilities::probe(scratch);
    let system = rustix::system::uname();
    let verdicts =
        |offers: &[Offer]| offers.iter().map(|offer| Verdict::of(offer, &capabilities)).collect();
    let diagnosis = Diagnosis {
        kernel: format!(
            "{} {}",
            system.sysname().to_string_lossy(),
            system.release().to_string_lossy()
        ),
        machine: system.machine().to_string_lossy().into_owned(),
        data: data.to_owned(),
        store: scene.settings.store_url().to_owned(),
        usrbio: usrbio(scene.settings.store_url()),
        planes: planes(&capabilities, scene.settings.store_url()),
        backends: verdicts(&BACKENDS),
        capabilities: capabilities
            .iter()
            .map(|(capability, finding)| Line { name: capability.name(), finding: finding.clone() })
            .collect(),
        removed_keeper_groups: fsd::keeper::remove_empty_groups(),
    };
    if scene.out.is_json() {
        return scene.out.result(&diagnosis, String::new);
    }
    scene.out.listing(&diagnosis.capabilities)?;
    write_out(summary(&diagnosis).as_bytes())
}

fn summary(diagnosis: &Diagnosis) -> String {
    let mut lines = vec![String::new(), "planes, the best first:".to_owned()];
    lines.extend(diagnosis.planes.iter().map(Verdict::line));
    lines.push("backends:".to_owned());
    lines.extend(diagnosis.backends.iter().map(Verdict::line));
    lines.push(format!("kernel: {} on {}", diagnosis.kernel, diagnosis.machine));
    lines.push(format!("data: {}, store: {}", diagnosis.data.display(), diagnosis.store));
    lines.extend(diagnosis.usrbio.iter().map(Verdict::line));
    if diagnosis.removed_keeper_groups > 0 {
        let count = diagnosis.removed_keeper_groups;
        lines.push(format!("removed {count} empty control groups of keepers that were killed"));
    }
    let mut text = String::new();
    for line in lines {
        text.push_str(&crate::output::escape(&line));
        text.push('\n');
    }
    text
}
