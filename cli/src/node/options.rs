//! How a node's file-system daemon keeps its cache: settings of `up` that go on to `fsd` as they are.
//!
//! Each can come from the environment too, so that a node that another command starts in the background
//! has them.

use crate::args::plane;
use crate::errors::{Failure, Outcome};
use crate::quantity::{self, show_bytes};
use crate::settings::Settings;
use clap::Args;
use fsd::PlaneKind;
use layer::Result;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::time::Duration;
use store::TrustedKeys;

/// Settings of the daemon.
#[derive(Debug, Clone, Default, Args)]
pub struct FsdOptions {
    /// How layers are given to the kernel where nobody asks for more [default: the best of this host]
    #[arg(long, env = "LAMELLA_PLANE", value_parser = plane())]
    pub plane: Option<PlaneKind>,
    /// Evict what was used longest ago when the node cache grows beyond this size
    #[arg(long, value_name = "SIZE", env = "LAMELLA_CACHE_SIZE", value_parser = quantity::bytes)]
    pub cache_size: Option<u64>,
    /// Evict until this size is reached [default: nine tenths of the cache size]
    #[arg(long, value_name = "SIZE", env = "LAMELLA_CACHE_LOW", value_parser = quantity::bytes)]
    pub cache_low: Option<u64>,
    /// Never fill the last free bytes of the cache disk [default: 64M]
    #[arg(long, value_name = "SIZE", env = "LAMELLA_CACHE_RESERVE", value_parser = quantity::bytes)]
    pub cache_reserve: Option<u64>,
    /// How long a read waits for room on a full cache disk before it fails [default: 5s]
    #[arg(long, value_name = "TIME", env = "LAMELLA_FULL_DISK_DEADLINE", value_parser = quantity::duration)]
    pub full_disk_deadline: Option<Duration>,
    /// Bound every `prefetch` that names no rate, in bytes a second, for example 50M
    #[arg(long, value_name = "SIZE", env = "LAMELLA_PREFETCH_RATE", value_parser = quantity::bytes)]
    pub prefetch_rate: Option<u64>,
    /// Compare a layer's metadata with its digest at every attach, not only at the first
    #[arg(long, env = "LAMELLA_VERIFY_METADATA")]
    pub verify_metadata: bool,
    /// Serve metrics in the format of Prometheus at http://ADDR/metrics, for example 127.0.0.1:9464
    #[arg(long, value_name = "ADDR", env = "LAMELLA_METRICS")]
    pub metrics: Option<SocketAddr>,
    /// Let in only what one of these has signed: a file with public keys, or a directory of files that end
    /// in .pub [default: DATA/trusted-keys, where it exists]
    #[arg(long, value_name = "KEYS", env = "LAMELLA_REQUIRE_SIGNATURE")]
    pub require_signature: Option<String>,
}

impl FsdOptions {
    /// Refuses settings that contradict each other.
    pub fn check(&self) -> Outcome {
        let (size, low) = (self.cache_size, self.cache_low);
        let Some(low) = low.filter(|low| size.is_none_or(|size| *low > size)) else {
            return Ok(());
        };
        Err(Failure::Usage(match size {
            Some(size) => format!(
                "--cache-low {} is more than --cache-size {}; nothing would be evicted",
                show_bytes(low),
                show_bytes(size)
            ),
            None => "--cache-low goes with --cache-size".to_owned(),
        }))
    }

    /// Reads the keys that are trusted, where signatures are required.
    pub fn trusted(&self, settings: &Settings) -> Result<Option<TrustedKeys>> {
        let usual = settings.data().join("trusted-keys");
        let usual = usual.exists().then(|| usual.to_string_lossy().into_owned());
        self.require_signature.clone().or(usual).map(|place| TrustedKeys::load(&place)).transpose()
    }

    /// The same settings as words of a command line, but for what the node does itself: metrics.
    pub fn words(&self) -> Vec<OsString> {
        let sizes = [
            ("--cache-size", self.cache_size),
            ("--cache-low", self.cache_low),
            ("--cache-reserve", self.cache_reserve),
            ("--prefetch-rate", self.prefetch_rate),
        ];
        let sizes = sizes.into_iter().filter_map(|(name, size)| Some((name, size?.to_string())));
        let deadline = self.full_disk_deadline.map(|time| format!("{}ms", time.as_millis()));
        let deadline = deadline.map(|time| ("--full-disk-deadline", time));
        let keys = self.require_signature.clone().map(|keys| ("--require-signature", keys));
        let plane = self.plane.map(|plane| ("--plane", plane.to_string()));
        let mut words: Vec<OsString> = sizes
            .chain(deadline)
            .chain(plane)
            .chain(keys)
            .flat_map(|(name, value)| [name.into(), value.into()])
            .collect();
        words.extend(self.verify_metadata.then(|| "--verify-metadata".into()));
        words
    }

    /// Puts the settings where the daemon reads them.
    pub fn apply(&self, config: &mut fsd::FsdConfig) {
        config.cache_limit = self.cache_size.map(|high_bytes| {
            let usual = fsd::CacheLimit::of(high_bytes);
            let low_bytes = self.cache_low.unwrap_or(usual.low_bytes);
            fsd::CacheLimit { high_bytes, low_bytes }
        });
        config.cache_reserve_bytes = self.cache_reserve.unwrap_or(config.cache_reserve_bytes);
        config.full_disk_deadline = self.full_disk_deadline.unwrap_or(config.full_disk_deadline);
        config.prefetch_rate = self.prefetch_rate.unwrap_or(config.prefetch_rate);
        config.verify_metadata = self.verify_metadata;
        config.metrics = self.metrics;
        config.plane = self.plane;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: FsdOptions,
    }

    #[test]
    fn marks_of_the_cache_that_contradict_each_other_are_wrong_usage() {
        let check = |line: &str| Line::parse_from(line.split(' ')).options.check();
        check("x --cache-size 20M --cache-low 10M").unwrap();
        check("x --cache-size 20M --cache-low 20M").unwrap();
        for bad in ["x --cache-size 10M --cache-low 20M", "x --cache-low 20M"] {
            let Err(Failure::Usage(why)) = check(bad) else { panic!("{bad} was accepted") };
            assert!(why.contains("--cache-low") && why.contains("--cache-size"), "{why}");
        }
    }

    #[test]
    fn what_up_is_told_reaches_the_daemon() {
        let line = "x --cache-size 10G --cache-low 8G --full-disk-deadline 250ms --verify-metadata \
                    --plane fuse --prefetch-rate 50M --require-signature /keys";
        let Line { options } = Line::parse_from(line.split_whitespace());
        let words = std::iter::once(OsString::from("x")).chain(options.words());
        let mut config = fsd::FsdConfig::new("/d", "/s");
        let handed = Line::parse_from(words).options;
        handed.apply(&mut config);
        assert_eq!(handed.require_signature.as_deref(), Some("/keys"));
        let limit = config.cache_limit.unwrap();
        assert_eq!((limit.high_bytes, limit.low_bytes), (10 << 30, 8 << 30));
        assert_eq!(config.full_disk_deadline, Duration::from_millis(250));
        assert!(config.verify_metadata);
        assert_eq!(config.plane, Some(PlaneKind::Fuse));
        assert_eq!((config.cache_reserve_bytes, config.prefetch_rate), (64 << 20, 50 << 20));
    }
}
