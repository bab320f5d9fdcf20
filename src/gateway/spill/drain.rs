//! What dead processes left in the spill's folder, written to the database before this process marks or serves anything.
//!
//! What must stay true: a file is removed only after all that it holds is in the database, or was found to be somebody
//! else's by now; what cannot be read or is refused stays under another name. To die in the middle loses nothing: the next
//! process begins the file again, and finds what was written as written.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use uuid::Uuid;

use super::disk::{self, ENDING, Unwritable};
use super::encoding::{decode, decode_freed};
use super::format::{BadHeader, Contents, Entry, FileHeader, HEADER, Kind, read_at};
use crate::gateway::settle::{End, Executed, NotExecuted, Unsettled, settle};
use crate::store::sealed::Keys;
use crate::store::{self, Error, LateEnd, LateOutcome, Records, Store};
use crate::telemetry::{Drained, Metrics, causes};

/// How many outcomes are under way at a time: one batch of the store.
const AT_ONCE: usize = store::batch::BATCH_MAX;
/// How long one try of a completion may take.
const TRY: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(200);
/// What is added to the name of a file that could not be drained as a whole.
const ASIDE: &str = "aside";

/// Why the spill was not drained. Nothing of it is lost.
#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    /// The folder cannot be made.
    #[error(transparent)]
    Unwritable(#[from] Unwritable),
    /// The folder cannot be looked through.
    #[error("the spill's folder cannot be read")]
    Folder(#[source] io::Error),
    /// The database does not take the pending outcomes.
    #[error("the database does not take the outcomes that the spill holds for it")]
    Store(#[source] Error),
}

/// A file of this database whose process is dead, with its pending entries.
struct Orphan {
    file: File,
    path: PathBuf,
    header: FileHeader,
    contents: Contents,
}

/// A file that is being drained.
struct Source {
    file: File,
    header: FileHeader,
    /// What opens its entries where they are sealed.
    keys: Arc<Keys>,
}

impl DrainError {
    /// Whether the same may succeed another time, with nobody doing anything about it.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Store(error) => error.may_pass(),
            Self::Unwritable(_) | Self::Folder(_) => false,
        }
    }
}

impl Source {
    /// What is owed, as it was before it was sealed. `None`: it is nothing that is kept here.
    fn read(&self, entry: Entry) -> io::Result<Option<End>> {
        let body = self.header.body(&self.file, entry)?;
        match entry.kind {
            Kind::Outcome => {
                let Some((mut completion, fingerprint)) = decode(&body) else { return Ok(None) };
                self.keys.open_completion(&mut completion).map_err(io::Error::other)?;
                let completion = Arc::new(completion);
                let (caller, row, found) = (None, None, false);
                let executed = Executed { completion, fingerprint, caller, row, found };
                Ok(Some(End::Complete(executed)))
            }
            Kind::Freed => {
                let Some((mut late, gone_on)) = decode_freed(&body) else { return Ok(None) };
                if let LateEnd::Released { answer } = &mut late.end {
                    self.keys.open_of(late.fence, answer).map_err(io::Error::other)?;
                }
                if gone_on {
                    return Ok(Some(End::Late(Box::new(late))));
                }
                let LateOutcome { scope, fence, end } = late;
                // The process that died had tried it before it was kept.
                let release = NotExecuted { scope, fence, late: Some(end), tried: true };
                Ok(Some(End::Release(release)))
            }
            Kind::Tombstone => Ok(None),
        }
    }
}

/// What a file is to this process.
enum Examined {
    /// Nothing: it is another living process's, or it held nothing and is gone.
    Nothing,
    /// To be drained.
    Orphan(Box<Orphan>),
    /// To be left alone, and why.
    LeftAlone(String),
}

/// How a file's draining ended.
#[derive(Default)]
struct Tally {
    drained: u64,
    /// What could not be written, and why it never will.
    refused: u64,
}

/// Writes to the database what dead processes left in this folder, and removes their files. To be called before anything of
/// theirs is marked, and before the process makes a file of its own: where the disk is full, this makes room.
/// `patience`: how long the store may be away in the middle. After a failure it may be asked again.
///
/// # Errors
/// [`DrainError`]: the process must not serve then.
pub async fn drain(
    folder: &Path,
    database: Uuid,
    keys: &Arc<Keys>,
    store: &Arc<dyn Store>,
    metrics: &Metrics,
    patience: Duration,
) -> Result<(), DrainError> {
    disk::make_folder(folder).map_err(|cause| Unwritable::new(folder, cause))?;
    let mut alone = 0;
    for path in files(folder).map_err(DrainError::Folder)? {
        let examining = path.clone();
        let examined = tokio::task::spawn_blocking(move || examine(&examining, database)).await;
        let found = match examined.map_err(io::Error::other) {
            Ok(Ok(found)) => found,
            Ok(Err(error)) | Err(error) => {
                Examined::LeftAlone(format!("it cannot be read: {error}"))
            }
        };
        match found {
            Examined::Nothing => {}
            Examined::Orphan(orphan) => {
                alone += u64::from(!drain_file(*orphan, keys, store, metrics, patience).await?);
            }
            Examined::LeftAlone(why) => {
                alone += 1;
                let path = path.display();
                tracing::error!(%path, "a spill file is left alone: {why}");
            }
        }
    }
    metrics.spill_left_files(alone);
    Ok(())
}

/// Writes all that a file holds to the database, and removes it. Whether that was all of it; else the file is set aside.
async fn drain_file(
    orphan: Orphan,
    keys: &Arc<Keys>,
    store: &Arc<dyn Store>,
    metrics: &Metrics,
    patience: Duration,
) -> Result<bool, DrainError> {
    let Orphan { file, path, header, contents } = orphan;
    let (file, mut tally) =
        (Arc::new(Source { file, header, keys: Arc::clone(keys) }), Tally::default());
    for entries in contents.pending.chunks(AT_ONCE) {
        drain_batch(&file, entries, store, metrics, patience, &mut tally).await?;
    }
    let shown = path.display();
    if contents.torn {
        tracing::warn!(path = %shown, "the last entry of a spill file is torn: its process died while it wrote, and confirmed it to nobody");
    }
    let Tally { drained, refused } = tally;
    tracing::warn!(path = %shown, drained, "the outcomes that a dead process left in the spill are in the database");
    if contents.damaged == 0 && refused == 0 {
        drop(std::fs::remove_file(&path));
        return Ok(true);
    }
    let aside = path.with_extension(format!("{ENDING}.{ASIDE}"));
    let renamed = std::fs::rename(&path, &aside).err();
    tracing::error!(
        path = %aside.display(), damaged = contents.damaged, refused, ?renamed,
        "not all of a spill file could be written to the database: it is set aside; records of it stay unknown until an operator resolves them"
    );
    Ok(false)
}

async fn drain_batch(
    file: &Arc<Source>,
    entries: &[Entry],
    store: &Arc<dyn Store>,
    metrics: &Metrics,
    patience: Duration,
    tally: &mut Tally,
) -> Result<(), DrainError> {
    let mut tasks = JoinSet::new();
    for entry in entries.iter().copied() {
        let (file, store) = (Arc::clone(file), Arc::clone(store));
        tasks.spawn(async move { pay_one(file, entry, &*store, patience).await });
    }
    // All are awaited, also after a failure: while one holds the file it stays locked, and the next try would take it for a
    // living process's.
    let mut failed = Ok(());
    while let Some(ended) = tasks.join_next().await {
        match ended.map_err(|panic| Error::InDoubt(panic.into())).flatten() {
            Ok(Some(result)) => {
                metrics.spill_drained(result);
                if result == Drained::FencedOff {
                    metrics.late_outcome();
                }
                let refused = result == Drained::Refused;
                tally.refused += u64::from(refused);
                tally.drained += u64::from(!refused);
            }
            Ok(None) => tally.refused += 1,
            Err(error) => failed = Err(DrainError::Store(error)),
        }
    }
    failed
}

/// The folder's files that may hold outcomes. Their order means nothing.
fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == ENDING || end == ASIDE) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn examine(path: &Path, database: Uuid) -> io::Result<Examined> {
    if path.extension().is_some_and(|end| end == ASIDE) {
        return Ok(Examined::LeftAlone("it was set aside".to_owned()));
    }
    let Some(file) = disk::take_over(path)? else { return Ok(Examined::Nothing) };
    let length = file.metadata()?.len();
    let header = match read_header(&file, length)? {
        Ok(header) => header,
        Err(BadHeader::Short) => return remove(path),
        Err(BadHeader::Newer(version)) => {
            let why =
                format!("its format is version {version}: start a newer oncegate on this folder");
            return Ok(Examined::LeftAlone(why));
        }
        Err(BadHeader::Damaged) => {
            return Ok(Examined::LeftAlone("its header is damaged, or it is no spill".to_owned()));
        }
    };
    let contents = header.read(&file, length)?;
    if contents.pending.is_empty() && contents.damaged == 0 {
        return remove(path);
    }
    if header.database != database {
        let why = format!(
            "it holds {} outcomes of another database ({}; this one is {database}): start oncegate with that database on \
             this folder, and it is drained; delete the file only if that database is gone for good",
            contents.pending.len(),
            header.database
        );
        return Ok(Examined::LeftAlone(why));
    }
    Ok(Examined::Orphan(Box::new(Orphan { file, path: path.to_owned(), header, contents })))
}

/// While its lock is held: a process that is just making it sees that it is gone, and makes another one.
fn remove(path: &Path) -> io::Result<Examined> {
    std::fs::remove_file(path).map(|()| Examined::Nothing)
}

fn read_header(file: &File, length: u64) -> io::Result<Result<FileHeader, BadHeader>> {
    Ok(FileHeader::decode(&read_at(file, 0, length.min(HEADER))?))
}

/// Pays one outcome, for as long as the patience lasts. `None`: it cannot be read.
async fn pay_one(
    file: Arc<Source>,
    entry: Entry,
    store: &dyn Store,
    patience: Duration,
) -> Result<Option<Drained>, Error> {
    let reading = tokio::task::spawn_blocking(move || file.read(entry));
    let read = reading.await.map_err(io::Error::other).flatten();
    match read {
        Ok(Some(end)) => write(end, store, patience).await.map(Some),
        Ok(None) => Ok(None),
        Err(error) => {
            tracing::error!(%error, "an outcome in the spill cannot be read");
            Ok(None)
        }
    }
}

/// Writes one outcome to the store, for as long as the patience lasts. One that it refuses for good keeps nobody from starting.
async fn write(mut end: End, store: &dyn Records, patience: Duration) -> Result<Drained, Error> {
    let give_up = Instant::now() + patience;
    let mut logged = false;
    loop {
        let error = match settle_and_note(&end, store).await {
            Ok(result) => return Ok(result),
            Err(error) => error,
        };
        if !error.may_pass() {
            let (record, error) = (end.fence().id, causes(&error));
            tracing::error!(%record, error, "the database refuses an outcome of the spill");
            match end.refused() {
                Some(less) => end = less,
                None => return Ok(Drained::Refused),
            }
            continue;
        }
        if Instant::now() >= give_up {
            return Err(error.into());
        }
        if !std::mem::replace(&mut logged, true) {
            tracing::warn!(error = %causes(&error), "an outcome in the spill is not taken yet");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn settle_and_note(end: &End, store: &dyn Records) -> Result<Drained, Unsettled> {
    let settlement = settle(store, end, Instant::now() + TRY).await?;
    if let Some(late) = settlement.late() {
        store.note_late_outcome(late).await?;
        let (record, outcome) = (late.fence.id, late.summary());
        tracing::warn!(%record, outcome, "a late outcome of the spill is kept in the audit table");
    }
    Ok(settlement.result())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Attempt, Fence, Key, Operation, Record, RecordId, Scope, Tenant};
    use crate::store::layer::Layer;
    use crate::store::{Changed, OperatorsLayer, OutboxLayer, RecordsLayer, SinksLayer};

    /// Finds no row of any attempt; it cannot read the record that is there, or the audit table refuses what is noted.
    #[derive(Clone, Copy)]
    enum Broken {
        Reading,
        Noting,
    }

    impl Layer for Broken {
        fn beneath(&self) -> Result<&dyn Store, Error> {
            Err(Error::Unavailable("not asked here".into()))
        }
    }

    impl RecordsLayer for Broken {
        async fn release(&self, _: &Scope, _: Fence) -> Result<Changed, Error> {
            Ok(Changed::No)
        }

        async fn find(&self, _: &Scope) -> Result<Option<Record>, Error> {
            match self {
                Self::Reading => Err(Error::Unreadable("its key is missing".into())),
                Self::Noting => Ok(None),
            }
        }

        async fn note_late_outcome(&self, _: &LateOutcome) -> Result<(), Error> {
            Err(Error::Refused("a value that it cannot hold".into()))
        }
    }

    impl OutboxLayer for Broken {}
    impl SinksLayer for Broken {}
    impl OperatorsLayer for Broken {}

    #[tokio::test]
    async fn what_the_database_never_takes_is_set_aside_and_keeps_nobody_from_starting() {
        let fence = Fence { id: RecordId::fresh(), attempt: Attempt::FIRST };
        let scope = Scope {
            tenant: Tenant::stored("t"),
            operation: Operation::stored("o"),
            key: Key::stored("k"),
        };
        for broken in [Broken::Reading, Broken::Noting] {
            let (scope, late) = (scope.clone(), Some(LateEnd::NotSent));
            let end = End::Release(NotExecuted { scope, fence, late, tried: false });
            let written = write(end, &broken, Duration::from_secs(60)).await;
            assert!(matches!(written, Ok(Drained::Refused)), "{written:?}");
        }
    }
}
