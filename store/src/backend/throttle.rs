//! Makes any backend as slow as a distant one: a bandwidth that all requests share and a latency for
//! each of them. For bench and demo; it sleeps, and changes nothing else.
//!
//! Bandwidth is a queue: each request takes the link for its bytes after the requests before it, so two
//! concurrent readers each see half. The latency is per request and overlaps between requests. The link is
//! shared by everything that uses this value, not between processes.
//!
//! Locking: one lock around the instant at which the link is free; nobody sleeps under it.

use super::{Backend, Upload};
use crate::key::Key;
use layer::Result;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How slow a throttled store is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Speed {
    /// Bytes a second over all requests; 0 is no limit.
    pub bandwidth_bytes_per_s: u64,
    /// What each request waits beside its transfer.
    pub latency: Duration,
}

#[derive(Debug)]
struct Link {
    speed: Speed,
    free_at: Mutex<Instant>,
}

impl Link {
    fn pass(&self, bytes: usize) {
        let now = Instant::now();
        let done = match self.speed.bandwidth_bytes_per_s {
            0 => now,
            rate => {
                let transfer = Duration::from_secs_f64(bytes as f64 / rate as f64);
                let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
                *free_at = now.max(*free_at) + transfer;
                *free_at
            }
        };
        thread::sleep((done + self.speed.latency).saturating_duration_since(now));
    }
}

/// A slow store.
#[derive(Debug)]
pub struct Throttle {
    inner: Arc<dyn Backend>,
    link: Arc<Link>,
}

impl Throttle {
    /// Puts a link of this speed before `inner`.
    pub fn new(inner: Arc<dyn Backend>, speed: Speed) -> Self {
        Self { inner, link: Arc::new(Link { speed, free_at: Mutex::new(Instant::now()) }) }
    }
}

impl Backend for Throttle {
    fn read_at(&self, key: &Key, offset: u64, into: &mut [u8]) -> Result<()> {
        self.link.pass(into.len());
        self.inner.read_at(key, offset, into)
    }

    fn read_all(&self, key: &Key, max_bytes: u64) -> Result<Vec<u8>> {
        let bytes = self.inner.read_all(key, max_bytes)?;
        // Only now is it known how many had to pass.
        self.link.pass(bytes.len());
        Ok(bytes)
    }

    fn size(&self, key: &Key) -> Result<u64> {
        self.link.pass(0);
        self.inner.size(key)
    }

    fn create(&self, key: &Key) -> Result<Box<dyn Upload>> {
        let inner = self.inner.create(key)?;
        Ok(Box::new(ThrottledUpload { inner, link: self.link.clone(), unpaid: 0 }))
    }

    fn list(&self, prefix: &str, start_after: Option<&str>, limit: usize) -> Result<Vec<String>> {
        self.link.pass(0);
        self.inner.list(prefix, start_after, limit)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.link.pass(0);
        self.inner.delete(key)
    }

    fn describe(&self) -> String {
        let Speed { bandwidth_bytes_per_s, latency } = self.link.speed;
        let inner = self.inner.describe();
        format!("{inner} throttled to {bandwidth_bytes_per_s} B/s and {} ms", latency.as_millis())
    }
}

/// An upload is one request for each of these many bytes, not one for each small write.
const UPLOAD_REQUEST_BYTES: usize = 1 << 20;

struct ThrottledUpload {
    inner: Box<dyn Upload>,
    link: Arc<Link>,
    unpaid: usize,
}

impl Upload for ThrottledUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.unpaid += bytes.len();
        if self.unpaid >= UPLOAD_REQUEST_BYTES {
            self.link.pass(self.unpaid);
            self.unpaid = 0;
        }
        self.inner.write(bytes)
    }

    fn publish(self: Box<Self>) -> Result<()> {
        self.link.pass(self.unpaid);
        self.inner.publish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::memory::Memory;

    #[test]
    fn a_request_takes_at_least_its_share_of_the_link() {
        let memory = Memory::new();
        let key = Key::new("a").unwrap();
        let mut upload = memory.create(&key).unwrap();
        upload.write(&[7; 20_000]).unwrap();
        upload.publish().unwrap();
        let speed = Speed { bandwidth_bytes_per_s: 1_000_000, latency: Duration::from_millis(5) };
        let slow = Throttle::new(Arc::new(memory), speed);
        let start = Instant::now();
        let mut bytes = [0; 20_000];
        slow.read_at(&key, 0, &mut bytes).unwrap();
        // Sleeping is never shorter than asked, so a lower bound holds on any machine.
        assert!(start.elapsed() >= Duration::from_millis(25));
        assert_eq!(bytes, [7; 20_000]);
    }
}
