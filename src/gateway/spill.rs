//! Outcomes that the database has not taken: in a local file, synced, until it has.
//!
//! An outcome that the store does not take goes here before its caller is answered, with all that its completion needs:
//! answer, rendered events, retention, fence. The retrier goes on writing it to the database from memory and notes here
//! what is written. When the process dies first, the next one that is started on the folder writes it ([`drain()`]).
//! What must stay true:
//!
//! - An outcome counts as kept when its entry is synced, and not before. What is waiting shares one write and one sync;
//!   a thread of its own does both, so nothing of it blocks the runtime.
//! - Each process has a file of its own and holds its lock (`disk`): processes may share a folder.
//! - A file that somebody removes, renames or replaces is noticed, and all that it held moves to a new one (`writer`).
//! - A file names its database and is never written into another one.
//! - It is bounded. While it is nearly full, or an outcome that had no room is pending in memory only, or its file was taken
//!   away and none can be made, nothing new is reserved ([`Spill::is_full`]).
//! - Draining is fenced by record and attempt, so what was written before is found as written, and what was taken over
//!   meanwhile is left alone: such an outcome goes to the audit table. It is done before the process marks or serves
//!   anything, and before its own file is made: on a full disk, that is what makes room.
//!
//! A process that dies while it writes leaves a torn entry, which was confirmed to nobody. A file with damage, or of another
//! database, is never deleted: an operator has to look.

mod disk;
mod drain;
mod encoding;
mod format;
mod writer;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use tokio::sync::oneshot;
use uuid::Uuid;

use self::disk::OwnFile;
pub use self::disk::{Disk, Unwritable};
pub use self::drain::{DrainError, drain};
use self::encoding::encode_freed;
pub(super) use self::encoding::{decode, encode};
use self::format::{Entry, FileHeader, Kind};
use self::writer::{Level, NotKept, Order, Writer};
use crate::fault::{self, Point};
use crate::record::{Fingerprint, RecordId};
use crate::store::sealed::Keys;
use crate::store::{self, Completion, LateEnd, LateOutcome};
use crate::tasks::{self, Vital};
use crate::telemetry::{Drained, Metrics, causes};

/// Orders that may wait for the thread; beyond it an outcome counts as not kept. More than there are requests in flight.
const QUEUE_MAX: usize = 8192;

/// How a spill is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The folder of its files.
    pub dir: PathBuf,
    /// Most bytes of outcomes in the file of one process.
    pub bytes_max: u64,
}

/// Tries whether a spill could be kept in this folder, and leaves nothing of it behind.
///
/// # Errors
/// [`Unwritable`].
pub fn probe(dir: &Path) -> Result<(), Unwritable> {
    disk::probe(dir).map_err(|cause| Unwritable::new(dir, cause))
}

/// A process's spill. Clones are one spill.
#[derive(Clone)]
pub struct Spill {
    orders: SyncSender<Order>,
    level: Arc<Level>,
    /// With which keys outcomes are sealed.
    keys: Arc<Keys>,
}

impl Spill {
    /// A spill whose file is made later. What is to be kept before that waits for it.
    #[must_use]
    pub fn new(bytes_max: u64, keys: Arc<Keys>, metrics: Arc<Metrics>) -> (Self, Unopened) {
        let level = Arc::new(Level::new(bytes_max, metrics));
        let (orders, queue) = sync_channel(QUEUE_MAX);
        (Self { orders, level: Arc::clone(&level), keys }, Unopened { queue, level })
    }

    /// Keeps an outcome until the database has taken it. When this returns `Spilled`, it is durable.
    pub(super) async fn keep(&self, completion: &Completion, fingerprint: Fingerprint) -> Keeping {
        let mut sealed = completion.clone();
        let entry = self.keys.seal_completion(&mut sealed);
        let entry = entry.map(|()| (Kind::Outcome, encode(&sealed, fingerprint)));
        self.keep_entry(completion.fence.id, entry).await
    }

    /// Keeps that an attempt did not execute, until the database has taken it. `gone_on`: its record has gone on, so that this
    /// is only to be noted. An outcome of what executed is kept by [`Spill::keep`].
    pub(super) async fn keep_freed(&self, late: &LateOutcome, gone_on: bool) -> Keeping {
        let mut sealed = late.clone();
        let entry = match &mut sealed.end {
            LateEnd::Released { answer } | LateEnd::Completed { answer, .. } => {
                self.keys.seal_of(late.fence, answer)
            }
            LateEnd::NotSent => Ok(()),
        };
        let entry = entry.map(|()| (Kind::Freed, encode_freed(&sealed, gone_on)));
        self.keep_entry(late.fence.id, entry).await
    }

    /// Keeps an entry. One that cannot be sealed is not written.
    async fn keep_entry(
        &self,
        record: RecordId,
        entry: Result<(Kind, Vec<u8>), store::Error>,
    ) -> Keeping {
        let (reply, result) = oneshot::channel();
        fault::point(Point::Spilling).await;
        let order = |(kind, body)| self.orders.try_send(Order::Keep { kind, body, reply });
        let kept = match entry.map(order) {
            Ok(Ok(())) => result.await.unwrap_or(Err(NotKept::Closed)),
            Ok(Err(_)) => Err(NotKept::Closed),
            Err(error) => Err(NotKept::Unsealed(causes(&error))),
        };
        fault::point(Point::Spilled).await;
        match kept {
            Ok(entry) => {
                tracing::info!(%record, "an outcome that the database did not take is in the spill");
                Keeping::Spilled(Receipt { spill: self.clone(), entry })
            }
            Err(why) => {
                let note = "an outcome is pending in memory only and not in the spill: until it is written, nothing new is reserved";
                tracing::error!(%record, %why, "{note}");
                Keeping::Memory(MemoryOnly::new(&self.level))
            }
        }
    }

    /// For an outcome of a lost task, which nobody could write to the spill: it is pending in memory only.
    pub(super) fn in_memory(&self) -> Keeping {
        Keeping::Memory(MemoryOnly::new(&self.level))
    }

    /// Whether nothing new may be reserved: what it would come to might not be kept.
    pub(super) fn is_full(&self) -> bool {
        self.level.is_high()
            || self.level.is_gone()
            || self.level.unkept.load(Ordering::Relaxed) > 0
    }

    /// A reservation was refused because the spill is full, or has no file to write to.
    pub(super) fn refused(&self) {
        self.level.metrics.spill_refused();
    }

    /// Ends the spill: waits for what is under way. The file goes where nothing in it is pending, else it stays for the next
    /// process. How many outcomes it holds then.
    pub async fn close(&self) -> usize {
        let (reply, closed) = oneshot::channel();
        match self.orders.try_send(Order::Close { reply }) {
            // Where the thread had ended before, its side is dropped at once.
            Ok(()) => closed.await.unwrap_or(0),
            Err(_) => 0,
        }
    }
}

/// A spill without its file. Where it is dropped, nothing is kept.
pub struct Unopened {
    queue: Receiver<Order>,
    level: Arc<Level>,
}

impl Unopened {
    /// Makes a new file in the folder, for pending outcomes of this database.
    ///
    /// # Errors
    /// [`Unwritable`].
    pub fn open(self, dir: &Path, database: Uuid) -> Result<(), Unwritable> {
        let held = OwnFile::create(dir).map_err(|cause| Unwritable::new(dir, cause))?;
        tracing::debug!(path = %held.path().display(), "the spill is ready");
        self.on(Box::new(held), database).map_err(|cause| Unwritable::new(dir, cause))
    }

    /// Begins on this disk.
    ///
    /// # Errors
    /// Where the disk does not take the first bytes, or no thread can be started.
    pub fn on(self, disk: Box<dyn Disk>, database: Uuid) -> io::Result<()> {
        let Self { queue, level } = self;
        let writer = Writer::begin(disk, FileHeader::new(database), level)?;
        tasks::thread(Vital::SpillWriter, "spill-writer", move || writer.run(&queue))?;
        Ok(())
    }
}

/// Where a pending outcome is, besides in memory.
pub(crate) enum Keeping {
    /// In the spill: it outlives the process.
    Spilled(Receipt),
    /// Nowhere: the process must not die before it is written.
    Memory(MemoryOnly),
}

impl Keeping {
    /// It is no longer pending, and why.
    pub(super) fn paid(self, how: Drained) {
        match self {
            Self::Spilled(Receipt { spill, entry }) => {
                spill.level.metrics.spill_drained(how);
                // Where the note is lost, the next process asks the database and finds it written.
                drop(spill.orders.try_send(Order::Remove(entry)));
            }
            Self::Memory(unkept) => drop(unkept),
        }
    }
}

/// For an outcome in the spill.
pub(crate) struct Receipt {
    spill: Spill,
    entry: Entry,
}

/// Counts an outcome that is in memory only, until it is dropped.
pub(crate) struct MemoryOnly(Arc<Level>);

impl MemoryOnly {
    fn new(level: &Arc<Level>) -> Self {
        level.unkept.fetch_add(1, Ordering::Relaxed);
        level.metrics.spill_turned_away();
        Self(Arc::clone(level))
    }
}

impl Drop for MemoryOnly {
    fn drop(&mut self) {
        self.0.unkept.fetch_sub(1, Ordering::Relaxed);
    }
}
