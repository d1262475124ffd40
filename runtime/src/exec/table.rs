//! The commands of a sandbox that are known: those that run, and the last ones that ended; and where all
//! sandboxes of the node keep what is known of theirs.
//!
//! Locking: a mutex over the table, held for look-ups. CRASH: what is known is in the journal of commands before
//! a client hears of it, and what was printed is in files; see [`super::adopt`].

use super::command::Command;
use super::output::Output;
use super::record::CommandRecord;
use crate::journal::{Entry, Journal};
use layer::{Context, Error, ErrorKind, Result};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Name of the sandbox's own command.
pub const MAIN: &str = "main";
/// Ended commands that a sandbox remembers.
const MAX_ENDED: usize = 64;
/// Folder of what commands print.
const OUTPUT: &str = "output";

/// Where the node keeps what is known of commands.
#[derive(Debug)]
pub struct CommandStore {
    journal: Journal<CommandRecord>,
    folder: PathBuf,
}

/// What an earlier runtime knew of commands.
#[derive(Debug, Default)]
pub struct Remembered {
    /// By sandbox, the oldest first.
    pub records: HashMap<String, Vec<CommandRecord>>,
    /// Offsets of the segments of output, by `SANDBOX-COMMAND`.
    segments: HashMap<String, Vec<u64>>,
}

impl CommandStore {
    /// Opens it below the folder of sandboxes.
    pub fn open(folder: &Path) -> Result<(Self, Remembered)> {
        let (journal, records) = Journal::<CommandRecord>::open(folder)?;
        let folder = folder.join(OUTPUT);
        let context = || format!("list {}", folder.display());
        std::fs::create_dir_all(&folder).context(context)?;
        let mut remembered = Remembered::default();
        for record in records {
            let sandbox = record.names().0.to_owned();
            remembered.records.entry(sandbox).or_default().push(record);
        }
        for entry in std::fs::read_dir(&folder).context(context)? {
            let name = entry.context(context)?.file_name();
            let parts = name.to_str().and_then(|name| name.rsplit_once('-'));
            let Some((name, start)) = parts else { continue };
            let Ok(start) = u64::from_str_radix(start, 16) else { continue };
            remembered.segments.entry(name.to_owned()).or_default().push(start);
        }
        Ok((Self { journal, folder }, remembered))
    }

    /// Writes down what is known of a command.
    pub fn append(&self, record: &CommandRecord) -> Result<()> {
        self.journal.append(record)
    }

    fn prefix(&self, sandbox: &str, command: &str) -> PathBuf {
        self.folder.join(format!("{sandbox}-{command}"))
    }

    /// Removes output that belongs to no command any more, and the records that nobody took.
    pub fn sweep(&self, remembered: Remembered) {
        for (name, starts) in remembered.segments {
            for start in starts {
                let path = self.folder.join(format!("{name}-{start:016x}"));
                if let Err(error) = std::fs::remove_file(&path) {
                    tracing::warn!(%error, path = %path.display(), "remove old output");
                }
            }
        }
        for record in remembered.records.values().flatten() {
            self.forget(record.key());
        }
    }

    fn forget(&self, key: &str) {
        if let Err(error) = self.journal.forget(key) {
            tracing::warn!(error = %error.chain(), "journal of commands");
        }
    }
}

/// The commands of one sandbox.
#[derive(Debug)]
pub struct Commands {
    sandbox: String,
    store: Arc<CommandStore>,
    known: Mutex<HashMap<String, Arc<Command>>>,
    /// Bytes of output on disk.
    output_bytes: Arc<AtomicU64>,
}

impl Commands {
    /// None yet.
    pub fn new(sandbox: &str, store: &Arc<CommandStore>) -> Self {
        Self {
            sandbox: sandbox.to_owned(),
            store: Arc::clone(store),
            known: Mutex::default(),
            output_bytes: Arc::default(),
        }
    }

    /// Where what is known of them is kept.
    pub fn store(&self) -> &Arc<CommandStore> {
        &self.store
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Command>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A name that no command of the sandbox has.
    pub fn new_id(&self) -> Result<String> {
        loop {
            let mut bytes = [0; 4];
            getrandom::fill(&mut bytes).map_err(|error| {
                Error::new(ErrorKind::Internal, format!("random numbers: {error}"))
            })?;
            let id = format!("{:08x}", u32::from_le_bytes(bytes));
            if !self.lock().contains_key(&id) {
                return Ok(id);
            }
        }
    }

    /// A place for what a command prints.
    pub fn output(&self, id: &str, kept_bytes: u64) -> Output {
        let prefix = self.store.prefix(&self.sandbox, id);
        Output::new(prefix, kept_bytes, Arc::clone(&self.output_bytes))
    }

    /// What a command printed under an earlier runtime.
    pub fn old_output(&self, record: &CommandRecord, remembered: &mut Remembered) -> Output {
        let (sandbox, id) = record.names();
        let starts = remembered.segments.remove(&format!("{sandbox}-{id}")).unwrap_or_default();
        let prefix = self.store.prefix(sandbox, id);
        Output::reopen(prefix, record.kept_bytes, Arc::clone(&self.output_bytes), starts)
    }

    /// Adds a command.
    pub fn insert(&self, command: &Arc<Command>) {
        self.lock().insert(command.id().to_owned(), Arc::clone(command));
    }

    /// A command by its id or an unambiguous prefix of it.
    pub fn find(&self, id: &str) -> Result<Arc<Command>> {
        let known = self.lock();
        if let Some(command) = known.get(id) {
            return Ok(Arc::clone(command));
        }
        let mut matching = known.iter().filter(|(known, _)| known.starts_with(id));
        match (matching.next(), matching.next()) {
            (Some((_, command)), None) if !id.is_empty() => Ok(Arc::clone(command)),
            (Some(_), Some(_)) => {
                Err(Error::invalid(format!("several commands begin with {id:?}")))
            }
            _ => {
                let text = format!("no command {id:?} in sandbox {}", self.sandbox);
                Err(Error::not_found(text))
            }
        }
    }

    /// The sandbox's own command.
    pub fn main(&self) -> Option<Arc<Command>> {
        self.lock().get(MAIN).cloned()
    }

    /// All, the oldest first.
    pub fn list(&self) -> Vec<Arc<Command>> {
        let mut list: Vec<_> = self.lock().values().cloned().collect();
        list.sort_by_cached_key(|command| command.record().started_unix_ns);
        list
    }

    /// Forgets a command and what it printed.
    pub fn forget(&self, command: &Command) {
        self.lock().remove(command.id());
        self.store.forget(command.record().key());
        command.output.remove();
    }

    /// Keeps the number of ended commands bounded.
    pub fn forget_oldest(&self) {
        let list = self.list();
        let ended: Vec<_> =
            list.iter().filter(|command| command.is_over() && command.id() != MAIN).collect();
        for command in ended.iter().take(ended.len().saturating_sub(MAX_ENDED)) {
            self.forget(command);
        }
    }

    /// Forgets all but the sandbox's own, once they have ended; for a sandbox that has.
    pub async fn retire(&self) {
        for command in self.list() {
            if command.id() != MAIN {
                command.wait_over().await;
                self.forget(&command);
            }
        }
    }

    /// Forgets all.
    pub fn forget_all(&self) {
        for command in self.list() {
            self.forget(&command);
        }
    }
}
