//! Sizes, times and shares as people type and read them.

use std::time::Duration;

/// Reads `512M`, `2GiB`, `4096`: powers of 1024.
pub fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| "expected a size such as 512M".to_owned())?;
    let shift = match unit.to_ascii_lowercase().trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(format!("unknown unit {unit:?}; use K, M, G or T")),
    };
    number.checked_mul(1 << shift).filter(|&n| n > 0).ok_or_else(|| "out of range".to_owned())
}

/// Reads `1.5` cores as thousandths of a core.
pub fn cpu_millis(text: &str) -> Result<u32, String> {
    let cores: f64 = text.parse().map_err(|_| "expected a number of cores".to_owned())?;
    if !(0.001..=100_000.0).contains(&cores) {
        return Err("expected at least 0.001 cores".to_owned());
    }
    Ok((cores * 1000.0).round() as u32)
}

/// Reads `30`, `30s`, `500ms`, `5m`, `2h`, `7d`; a bare number is seconds.
pub fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| "expected a time such as 30s".to_owned())?;
    let millis = match unit {
        "ms" => 1,
        "" | "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(format!("unknown unit {unit:?}; use ms, s, m, h or d")),
    };
    number.checked_mul(millis).map(Duration::from_millis).ok_or_else(|| "out of range".to_owned())
}

/// `1.2 MiB`
pub fn show_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// `12.3 %`, or a dash where there is no whole.
pub fn show_share(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    format!("{:.1} %", part as f64 * 100.0 / whole as f64)
}

/// `850 ms`, `12.3 s`, `4 min 10 s`
pub fn show_duration(time: Duration) -> String {
    let millis = time.as_millis();
    if millis < 1_000 {
        return format!("{millis} ms");
    }
    if millis < 60_000 {
        return format!("{:.1} s", time.as_secs_f64());
    }
    format!("{} min {} s", time.as_secs() / 60, time.as_secs() % 60)
}

/// Nanoseconds since 1970 as `2026-11-29T17:52:53Z`.
pub fn show_time(unix_ns: u64) -> String {
    show_seconds(i64::try_from(unix_ns / 1_000_000_000).unwrap_or(i64::MAX))
}

/// Seconds since 1970, also before it, as `2026-11-29T17:52:53Z`.
pub fn show_seconds(unix_s: i64) -> String {
    let days = unix_s.div_euclid(86_400);
    let second = unix_s.rem_euclid(86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Days since 1970-01-01 in the proleptic Gregorian calendar (H. Hinnant, "chrono-Compatible Low-Level
/// Date Algorithms": eras of 400 years that begin on the first of March).
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days.saturating_add(719_468);
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("512M"), Ok(512 << 20));
        assert_eq!(bytes("2GiB"), Ok(2 << 30));
        assert_eq!(bytes("1kb"), Ok(1024));
        for bad in ["", "M", "1.5G", "0", "-1", "1X", "99999999999999999999", "99999999999T"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
        assert_eq!(show_bytes(0), "0 B");
        assert_eq!(show_bytes(1023), "1023 B");
        assert_eq!(show_bytes(1536), "1.5 KiB");
        assert_eq!(show_bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(show_bytes(u64::MAX), "16384.0 PiB");
    }

    #[test]
    fn times_are_read_and_shown() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2h"), Ok(Duration::from_secs(7200)));
        assert!(duration("soon").is_err());
        assert_eq!(show_seconds(0), "1970-01-01T00:00:00Z");
        assert_eq!(show_seconds(-1), "1969-12-31T23:59:59Z");
        assert_eq!(show_seconds(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(show_seconds(1_795_974_773), "2026-11-29T17:52:53Z");
    }

    #[test]
    fn cores_are_thousandths() {
        assert_eq!(cpu_millis("1.5"), Ok(1500));
        assert!(cpu_millis("0").is_err());
        assert!(cpu_millis("NaN").is_err());
    }
}
