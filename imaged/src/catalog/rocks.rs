//! The only place that knows RocksDB: column families of bytes, batches and scans.
//!
//! Writes go through the write-ahead log without waiting for the disk. After a power loss the newest may be
//! missing; the store is asked on every miss, so nothing is lost by that.
//!
//! Locking: RocksDB's own. A second process on the same directory is refused by RocksDB's lock file.

use layer::{Context, Error, ErrorKind, Result};
use rocksdb::{
    BlockBasedOptions, Cache, ColumnFamily, ColumnFamilyDescriptor, DB, IteratorMode, LogLevel,
    Options, WriteBatch,
};
use std::path::Path;

/// Memory for blocks that were read, over all families.
const BLOCK_CACHE_BYTES: usize = 32 << 20;
/// Memory for what is not in a table yet, over all families.
const WRITE_BUFFERS_BYTES: usize = 32 << 20;
/// Tables kept open.
const OPEN_FILES: i32 = 128;

/// A map of bytes of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    Meta,
    Chunks,
    Packs,
    Layers,
    Environments,
    References,
}

impl Family {
    pub(super) const ALL: [Self; 6] =
        [Self::Meta, Self::Chunks, Self::Packs, Self::Layers, Self::Environments, Self::References];

    fn name(self) -> &'static str {
        match self {
            Self::Meta => "meta",
            Self::Chunks => "chunks",
            Self::Packs => "packs",
            Self::Layers => "layers",
            Self::Environments => "environments",
            Self::References => "references",
        }
    }
}

/// Looks at one key and value; an error ends the scan.
pub(super) type Visit<'a> = dyn FnMut(&[u8], &[u8]) -> Result<()> + 'a;

/// Changes that happen together.
#[derive(Default)]
pub(super) struct Batch(Vec<(Family, Vec<u8>, Option<Vec<u8>>)>);

impl Batch {
    pub(super) fn put(&mut self, family: Family, key: impl Into<Vec<u8>>, value: Vec<u8>) {
        self.0.push((family, key.into(), Some(value)));
    }

    pub(super) fn delete(&mut self, family: Family, key: impl Into<Vec<u8>>) {
        self.0.push((family, key.into(), None));
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

#[derive(Debug)]
pub(super) struct Rocks(DB);

impl Rocks {
    /// Opens or creates. One that RocksDB finds damaged is thrown away and made anew: it is a cache.
    pub(super) fn open(directory: &Path) -> Result<Self> {
        std::fs::create_dir_all(directory)
            .context(|| format!("create catalog {}", directory.display()))?;
        match open(directory) {
            Err(error) if error.kind() == rocksdb::ErrorKind::Corruption => {
                tracing::warn!(
                    "catalog {} is damaged and is made anew: {error}",
                    directory.display()
                );
                DB::destroy(&Options::default(), directory)
                    .and_then(|()| open(directory))
                    .map_err(|error| refused(directory, error))
            }
            Err(error) => Err(refused(directory, error)),
            Ok(db) => Ok(db),
        }
        .map(Self)
    }

    fn family(&self, family: Family) -> Result<&ColumnFamily> {
        let missing =
            || Error::new(ErrorKind::Internal, format!("catalog has no {}", family.name()));
        self.0.cf_handle(family.name()).ok_or_else(missing)
    }

    pub(super) fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.0.get_cf(self.family(family)?, key).map_err(failed)
    }

    /// One answer for each key, in order.
    pub(super) fn get_many<'a>(
        &self,
        family: Family,
        keys: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<Vec<Option<Vec<u8>>>> {
        let handle = self.family(family)?;
        let found = self.0.multi_get_cf(keys.into_iter().map(|key| (handle, key)));
        found.into_iter().map(|value| value.map_err(failed)).collect()
    }

    pub(super) fn write(&self, batch: Batch) -> Result<()> {
        let mut writes = WriteBatch::default();
        for (family, key, value) in batch.0 {
            match value {
                Some(value) => writes.put_cf(self.family(family)?, key, value),
                None => writes.delete_cf(self.family(family)?, key),
            }
        }
        self.0.write(writes).map_err(failed)
    }

    /// Visits everything in the order of keys.
    pub(super) fn scan(&self, family: Family, visit: &mut Visit<'_>) -> Result<()> {
        for item in self.0.iterator_cf(self.family(family)?, IteratorMode::Start) {
            let (key, value) = item.map_err(failed)?;
            visit(&key, &value)?;
        }
        Ok(())
    }
}

fn open(directory: &Path) -> std::result::Result<DB, rocksdb::Error> {
    let cache = Cache::new_lru_cache(BLOCK_CACHE_BYTES)?;
    let mut options = Options::default();
    options.create_if_missing(true);
    options.create_missing_column_families(true);
    options.set_max_open_files(OPEN_FILES);
    options.set_db_write_buffer_size(WRITE_BUFFERS_BYTES);
    options.set_max_total_wal_size(4 * WRITE_BUFFERS_BYTES as u64);
    options.set_keep_log_file_num(2);
    options.set_log_level(LogLevel::Warn);
    let families = Family::ALL.map(|family| {
        let mut tables = BlockBasedOptions::default();
        tables.set_block_cache(&cache);
        tables.set_bloom_filter(10.0, false);
        let mut options = Options::default();
        options.set_block_based_table_factory(&tables);
        ColumnFamilyDescriptor::new(family.name(), options)
    });
    DB::open_cf_descriptors(&options, directory, families)
}

fn refused(directory: &Path, error: rocksdb::Error) -> Error {
    let place = directory.display();
    if error.kind() == rocksdb::ErrorKind::IOError && error.to_string().contains("lock") {
        let context =
            format!("catalog {place} is in use by another process; one node per data directory");
        return Error::new(ErrorKind::Busy, context).with_source(error);
    }
    failed(error).context(format!("open catalog {place}"))
}

fn failed(error: rocksdb::Error) -> Error {
    let kind = match error.kind() {
        rocksdb::ErrorKind::Corruption => ErrorKind::Corrupt,
        rocksdb::ErrorKind::IOError if error.to_string().contains("No space") => ErrorKind::NoSpace,
        rocksdb::ErrorKind::Busy | rocksdb::ErrorKind::TryAgain => ErrorKind::Busy,
        _ => ErrorKind::Internal,
    };
    Error::new(kind, "catalog").with_source(error)
}
