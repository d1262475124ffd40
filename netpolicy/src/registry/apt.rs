//! Debian: the node plays the archive's servers over plain HTTP, as apt asks them. With a date it passes on the
//! archive as it was then, from the archive's own snapshots. The signatures are Debian's, so that nothing can
//! be left out of a list; a denied package is in it and cannot be fetched.

use super::{Asked, Failed, Outcome};
use crate::presets::Selection;

/// The servers that the node plays.
pub const SERVERS: [&str; 2] = ["deb.debian.org", "security.debian.org"];
/// Archives on them.
const ARCHIVES: [&str; 2] = ["debian", "debian-security"];

/// `ARCHIVE/dists/...`, `ARCHIVE/pool/...`.
pub fn look(selection: &Selection, asked: &Asked<'_>) -> Result<Outcome, Failed> {
    let Some((archive, path)) = asked.path.split_once('/') else { return Ok(Outcome::Missing) };
    let is_part = path.starts_with("dists/") || path.starts_with("pool/");
    if !ARCHIVES.contains(&archive) || !is_part {
        return Ok(Outcome::Missing);
    }
    if let Some(name) = denied(&selection.deny, path) {
        return Ok(Outcome::Hidden(name));
    }
    let place = |part: &str| selection.preset().upstream.get(part).cloned().unwrap_or_default();
    let base = match selection.before {
        Some(before) => format!("{}/{archive}/{}", place("snapshot"), moment(before.unix_s - 1)),
        None if asked.host == SERVERS[1] => format!("{}/{archive}", place("security")),
        None => format!("{}/{archive}", place("")),
    };
    Ok(Outcome::File(format!("{base}/{path}")))
}

/// The package of the pool that this is a file of, or its source package, if it is denied.
fn denied(deny: &[String], path: &str) -> Option<String> {
    let path = path.to_ascii_lowercase();
    let file = path.rsplit('/').next()?;
    let package = file.split('_').next()?;
    // pool/main/p/python3.11/python3.11-minimal_3.11.2-6_amd64.deb
    let source = path.strip_prefix("pool/")?.split('/').nth(2)?;
    [package, source]
        .into_iter()
        .find(|name| deny.iter().any(|denied| denied == name))
        .map(str::to_owned)
}

/// `20250131T120000Z`.
fn moment(unix_s: i64) -> String {
    let (days, second) = (unix_s.div_euclid(86_400), unix_s.rem_euclid(86_400));
    // Days since the first of March of the year 0, in cycles of 400 years.
    let days = days + 719_468;
    let (cycle, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + cycle * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}{month:02}{of_month:02}T{hour:02}{minute:02}{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::{Date, select};

    fn url(line: &str, host: &str, path: &str) -> Option<String> {
        let selection = select(line).unwrap().1.unwrap();
        match look(&selection, &Asked { path, host, accept: "" }).unwrap() {
            Outcome::File(url) => Some(url),
            _ => None,
        }
    }

    #[test]
    fn an_archive_is_shown_as_it_was() {
        let release = "debian/dists/bookworm/InRelease";
        let now = url("apt", "deb.debian.org", release);
        assert_eq!(now.unwrap(), format!("http://deb.debian.org/{release}"));
        let then = url("apt,before=2025-01-01", "deb.debian.org", release).unwrap();
        let snapshot = "http://snapshot.debian.org/archive/debian/20241231T235959Z";
        assert_eq!(then, format!("{snapshot}/dists/bookworm/InRelease"));
        assert_eq!(url("apt", "deb.debian.org", "other/dists/x"), None);
        assert_eq!(url("apt", "deb.debian.org", "debian/indices/x"), None);
    }

    #[test]
    fn denied_packages_are_found_by_their_own_and_their_source_name() {
        let deb = "debian/pool/main/c/curl/libcurl4_7.88.1-10_amd64.deb";
        assert!(url("apt,deny=nano", "deb.debian.org", deb).is_some());
        assert!(url("apt,deny=curl", "deb.debian.org", deb).is_none());
        assert!(url("apt,deny=libcurl4", "deb.debian.org", deb).is_none());
    }

    #[test]
    fn moments_are_written_as_they_are_read() {
        for (day, text) in
            [("1970-01-01", "19700101"), ("2024-02-29", "20240229"), ("2000-12-31", "20001231")]
        {
            assert_eq!(moment(Date::parse(day).unwrap().unix_s), format!("{text}T000000Z"));
        }
    }
}
