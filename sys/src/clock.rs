//! The time since the machine started, its sleep included: what deadlines that outlive a process are written in.

/// Nanoseconds since the machine started (CLOCK_BOOTTIME). Nobody can set it.
pub fn since_boot_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Which start of the machine this is.
pub fn boot_id() -> std::io::Result<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(id.trim().to_owned())
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_goes_on() {
        let before = super::since_boot_ns();
        assert!(before > 0 && super::since_boot_ns() >= before);
    }
}
