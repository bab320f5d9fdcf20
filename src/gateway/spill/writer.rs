//! The thread that writes the spill: what waits together is written together and synced once.
//!
//! What must stay true:
//!
//! - An outcome is answered for only after the sync that made it durable.
//! - An offset of the file is used again only after the file was truncated, which happens when nothing in it is pending.
//! - A failed write or sync promises nothing, and what was kept before it stays kept.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;

use tokio::sync::oneshot;

use super::disk::Disk;
use super::format::{Checksum, ENTRY_HEADER, Entry, FileHeader, HEADER, Kind};
use crate::telemetry::Metrics;

/// Most orders that share one sync.
const BATCH_MAX: usize = 64;

/// From this share of its room on, in eighths, a spill is full for new reservations: the rest is for what runs.
const HIGH_EIGHTHS: u64 = 7;

/// Who waits for an entry to be durable.
type Reply = oneshot::Sender<Result<Entry, NotKept>>;

/// What the thread is asked to do.
pub(super) enum Order {
    /// Make this body durable as an entry.
    Keep { kind: Kind, body: Vec<u8>, reply: Reply },
    /// This entry is no longer pending.
    Remove(Entry),
    /// The process ends. `reply` is told how many entries are left when that is done.
    Close { reply: oneshot::Sender<usize> },
}

/// Why an outcome was not kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotKept {
    #[error("the spill is full (store.spill.max_size)")]
    NoRoom,
    #[error("the disk did not take it: {0}")]
    Disk(String),
    #[error("it could not be sealed: {0}")]
    Unsealed(String),
    #[error("the spill is closed")]
    Closed,
}

/// How full a spill is: what its thread says, and everybody may ask.
pub(super) struct Level {
    bytes_max: u64,
    bytes: AtomicU64,
    /// Outcomes that are pending in memory only.
    pub(super) unkept: AtomicU64,
    pub(super) metrics: Arc<Metrics>,
}

impl Level {
    pub(super) fn new(bytes_max: u64, metrics: Arc<Metrics>) -> Self {
        Self { bytes_max, bytes: AtomicU64::new(0), unkept: AtomicU64::new(0), metrics }
    }

    fn set(&self, entries: usize, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
        self.metrics.spill(entries as u64, bytes);
    }

    pub(super) fn is_high(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= self.bytes_max / 8 * HIGH_EIGHTHS
    }
}

pub(super) struct Writer {
    disk: Box<dyn Disk>,
    header: FileHeader,
    /// Where the next entry goes.
    end: u64,
    /// What is pending, by offset.
    pending: HashMap<u64, Checksum>,
    level: Arc<Level>,
}

impl Writer {
    /// Begins the file. One that cannot be begun is removed: it holds nothing.
    pub(super) fn begin(
        mut disk: Box<dyn Disk>,
        header: FileHeader,
        level: Arc<Level>,
    ) -> io::Result<Self> {
        if let Err(error) = disk.write(&header.encode(), 0).and_then(|()| disk.sync()) {
            disk.remove();
            return Err(error);
        }
        Ok(Self { disk, header, end: HEADER, pending: HashMap::new(), level })
    }

    /// Works until the spill is closed or dropped.
    pub(super) fn run(mut self, orders: &Receiver<Order>) {
        let mut closed = None;
        while closed.is_none()
            && let Ok(order) = orders.recv()
        {
            let more = orders.try_iter().take(BATCH_MAX - 1);
            closed = self.batch(std::iter::once(order).chain(more));
        }
        let left = self.pending.len();
        // Either way the file is let go before that is told.
        if left == 0 {
            self.disk.remove();
        } else {
            drop(self.disk);
        }
        if let Some(closed) = closed {
            // Nobody waits any more.
            closed.send(left).ok();
        }
    }

    fn batch(&mut self, orders: impl Iterator<Item = Order>) -> Option<oneshot::Sender<usize>> {
        let (mut bodies, mut removed, mut close) = (Vec::new(), Vec::new(), None);
        for order in orders {
            match order {
                Order::Keep { kind, body, reply } => bodies.push((kind, body, reply)),
                Order::Remove(entry) => removed.push(entry),
                Order::Close { reply } => close = Some(reply),
            }
        }
        self.forget(&removed);
        let told = self.keep(bodies);
        // Before anybody is told: who asks afterwards how full it is sees what he was told of.
        self.level.set(self.pending.len(), self.end - HEADER);
        for (reply, result) in told {
            drop(reply.send(result));
        }
        close
    }

    fn forget(&mut self, removed: &[Entry]) {
        for entry in removed {
            self.pending.remove(&entry.offset);
        }
        if self.pending.is_empty() && self.end > HEADER && self.disk.truncate(HEADER).is_ok() {
            self.end = HEADER;
            return;
        }
        for entry in removed {
            // Only a help for the next process, which asks the database otherwise: neither synced nor missed.
            let body = entry.tombstone();
            if let Ok(note) = self.write(Kind::Tombstone, &body) {
                self.end = note.end();
            }
        }
    }

    /// Makes the bodies durable; what each of those who wait is told.
    fn keep(
        &mut self,
        bodies: Vec<(Kind, Vec<u8>, Reply)>,
    ) -> Vec<(Reply, Result<Entry, NotKept>)> {
        let begun = self.end;
        let mut told = Vec::with_capacity(bodies.len());
        for (kind, body, reply) in bodies {
            let written = self.write(kind, &body);
            if let Ok(entry) = &written {
                self.end = entry.end();
            }
            told.push((reply, written));
        }
        let synced = if self.end == begun { Ok(()) } else { self.disk.sync() };
        if let Err(error) = synced {
            // What of it is durable nobody knows. Where it cannot be cut off, what follows is written behind it.
            if self.disk.truncate(begun).is_ok() {
                self.end = begun;
            }
            let why = error.to_string();
            let lost = |result: Result<Entry, NotKept>| {
                result.and_then(|_| Err(NotKept::Disk(why.clone())))
            };
            return told.into_iter().map(|(reply, result)| (reply, lost(result))).collect();
        }
        let kept = told.iter().filter_map(|(_, result)| result.as_ref().ok());
        self.pending.extend(kept.map(|entry| (entry.offset, entry.checksum)));
        told
    }

    fn write(&mut self, kind: Kind, body: &[u8]) -> Result<Entry, NotKept> {
        let length = u32::try_from(body.len()).map_err(|_| NotKept::NoRoom)?;
        let entry = Entry { kind, offset: self.end, length, checksum: self.header.checksum(body) };
        if entry.end() - HEADER > self.level.bytes_max {
            return Err(NotKept::NoRoom);
        }
        let header = self.header.entry_header(self.end, kind, length, entry.checksum);
        let disk = &mut self.disk;
        let wrote = disk.write(&header, self.end);
        wrote
            .and_then(|()| disk.write(body, self.end + ENTRY_HEADER))
            .map_err(|error| NotKept::Disk(error.to_string()))?;
        Ok(entry)
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use std::os::unix::fs::FileExt as _;
    use std::sync::mpsc;

    use uuid::Uuid;

    use super::*;

    /// A file in memory that says what was done to it, and fails on demand.
    #[derive(Clone, Default)]
    struct Paper(Arc<Mutex<Sheet>>);

    #[derive(Default)]
    struct Sheet {
        bytes: Vec<u8>,
        syncs: usize,
        full: bool,
        unsyncable: bool,
        removed: bool,
    }

    impl Disk for Paper {
        fn write(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
            let mut sheet = self.0.lock();
            if sheet.full {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let end = usize::try_from(offset).unwrap() + bytes.len();
            if sheet.bytes.len() < end {
                sheet.bytes.resize(end, 0);
            }
            sheet.bytes[end - bytes.len()..end].copy_from_slice(bytes);
            Ok(())
        }

        fn sync(&mut self) -> io::Result<()> {
            let mut sheet = self.0.lock();
            sheet.syncs += 1;
            if sheet.unsyncable { Err(io::Error::other("bad sector")) } else { Ok(()) }
        }

        fn truncate(&mut self, length: u64) -> io::Result<()> {
            self.0.lock().bytes.truncate(usize::try_from(length).unwrap());
            Ok(())
        }

        fn remove(self: Box<Self>) {
            self.0.lock().removed = true;
        }
    }

    fn writer(bytes_max: u64) -> (Paper, Writer, FileHeader) {
        let (paper, header) = (Paper::default(), FileHeader::new(Uuid::from_u128(1)));
        let level = Arc::new(Level::new(bytes_max, Arc::new(Metrics::default())));
        let writer = Writer::begin(Box::new(paper.clone()), header.clone(), level).unwrap();
        (paper, writer, header)
    }

    /// Has these kept in one batch; what each is told.
    fn keep(writer: &mut Writer, bodies: &[&[u8]]) -> Vec<Result<Entry, NotKept>> {
        let (orders, replies): (Vec<_>, Vec<_>) = bodies
            .iter()
            .map(|body| {
                let (reply, told) = oneshot::channel();
                (Order::Keep { kind: Kind::Outcome, body: body.to_vec(), reply }, told)
            })
            .unzip();
        writer.batch(orders.into_iter());
        replies.into_iter().map(|mut told| told.try_recv().unwrap()).collect()
    }

    /// What the next process would find.
    fn found(paper: &Paper, header: &FileHeader) -> Vec<Vec<u8>> {
        let bytes = paper.0.lock().bytes.clone();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        let contents = header.read(&file, bytes.len() as u64).unwrap();
        assert_eq!((contents.damaged, contents.torn), (0, false));
        contents.pending.into_iter().map(|entry| header.body(&file, entry).unwrap()).collect()
    }

    #[test]
    fn a_file_that_cannot_be_begun_is_not_left_behind() {
        for unsyncable in [false, true] {
            let paper = Paper::default();
            *paper.0.lock() = Sheet { full: !unsyncable, unsyncable, ..Sheet::default() };
            let level = Arc::new(Level::new(1000, Arc::new(Metrics::default())));
            let header = FileHeader::new(Uuid::from_u128(1));
            assert!(Writer::begin(Box::new(paper.clone()), header, level).is_err());
            assert!(paper.0.lock().removed);
        }
    }

    #[test]
    fn what_waits_together_is_synced_once_and_is_found_by_the_next_process() {
        let (paper, mut writer, header) = writer(1000);
        let told = keep(&mut writer, &[b"one", b"two", b"three"]);
        assert!(told.iter().all(Result::is_ok));
        assert_eq!(paper.0.lock().syncs, 2, "the header's, and theirs");
        assert_eq!(found(&paper, &header), [b"one".to_vec(), b"two".to_vec(), b"three".to_vec()]);
    }

    #[test]
    fn what_is_removed_is_not_found_and_the_room_is_free_when_nothing_is_pending() {
        let (paper, mut writer, header) = writer(1000);
        let told: Vec<Entry> =
            keep(&mut writer, &[b"one", b"two"]).into_iter().map(Result::unwrap).collect();
        writer.batch(std::iter::once(Order::Remove(told[0])));
        assert_eq!(found(&paper, &header), [b"two".to_vec()]);
        assert_eq!(writer.pending.len(), 1);
        writer.batch(std::iter::once(Order::Remove(told[1])));
        assert_eq!(paper.0.lock().bytes.len() as u64, HEADER);
        assert!(keep(&mut writer, &[&[1; 900]])[0].is_ok(), "all of the room is there again");
    }

    #[test]
    fn what_does_not_fit_is_refused_and_what_fits_is_kept() {
        let (paper, mut writer, header) = writer(100);
        let told = keep(&mut writer, &[&[1; 60], &[2; 60], &[3; 5]]);
        assert!(
            matches!(told[..], [Ok(_), Err(NotKept::NoRoom), Err(NotKept::NoRoom)]),
            "{told:?}"
        );
        assert_eq!(found(&paper, &header), [vec![1; 60]]);
        assert!(writer.level.is_high());
    }

    #[test]
    fn a_disk_that_fails_promises_nothing_and_loses_nothing() {
        let (paper, mut writer, header) = writer(1000);
        assert!(keep(&mut writer, &[b"before"])[0].is_ok());
        paper.0.lock().unsyncable = true;
        assert!(matches!(keep(&mut writer, &[b"lost"])[0], Err(NotKept::Disk(_))));
        paper.0.lock().unsyncable = false;
        paper.0.lock().full = true;
        assert!(matches!(keep(&mut writer, &[b"full"])[0], Err(NotKept::Disk(_))));
        paper.0.lock().full = false;
        assert!(keep(&mut writer, &[b"after"])[0].is_ok());
        assert_eq!(found(&paper, &header), [b"before".to_vec(), b"after".to_vec()]);
    }

    #[test]
    fn the_file_goes_with_the_process_only_where_nothing_is_pending() {
        for pending in [false, true] {
            let (paper, mut writer, _) = writer(1000);
            let entry = keep(&mut writer, &[b"one"]).remove(0).unwrap();
            if !pending {
                writer.batch(std::iter::once(Order::Remove(entry)));
            }
            let (orders, queue) = mpsc::channel();
            drop(orders);
            writer.run(&queue);
            assert_eq!(paper.0.lock().removed, !pending);
        }
    }
}
