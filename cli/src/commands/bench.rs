//! `bench`: hands over to the bench crate, or lists what it can measure.

use super::Scene;
use crate::args::Bench;
use crate::errors::{Failure, Outcome};
use crate::output::Row;
use layer::{Error, ErrorKind};
use serde::Serialize;

#[derive(Debug, Serialize)]
struct Offer {
    name: &'static str,
    shows: &'static str,
}

impl Row for Offer {
    const HEADER: &'static [&'static str] = &["BENCH", "SHOWS"];

    fn cells(&self) -> Vec<String> {
        vec![self.name.to_owned(), self.shows.to_owned()]
    }
}

/// `bench`, in a process of its own. Blocks, and makes a runtime of its own: called outside of one.
pub fn bench(scene: &Scene, args: &Bench) -> Outcome {
    let Some((name, arguments)) = args.words.split_first() else {
        let offers = bench::NAMES.iter().map(|&(name, shows)| Offer { name, shows });
        return scene.out.listing(&offers.collect::<Vec<_>>());
    };
    if !bench::NAMES.iter().any(|(known, _)| known == name) {
        return Err(Failure::Usage(format!(
            "no bench is called {name}; `lamella bench` lists them"
        )));
    }
    let ran = match bench::is_worker() {
        true => bench::run(name, arguments).map(|()| 0),
        false => bench::supervise(name, arguments),
    };
    let code = ran.map_err(|error| -> Failure {
        Error::new(ErrorKind::Unavailable, format!("bench {name}"))
            .with_source(Box::<dyn std::error::Error + Send + Sync>::from(error))
            .into()
    })?;
    // What went wrong in the bench's own process is said already.
    if code == 0 { Ok(()) } else { Err(Failure::Code(code)) }
}
