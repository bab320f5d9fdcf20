//! The thread that writes the spill: what waits together is written together and synced once.
//!
//! What must stay true:
//!
//! - An outcome is answered for only after the sync that made it durable.
//! - An offset of the file is used again only after the file was truncated, which happens when nothing in it is pending.
//! - A failed write or sync promises nothing, and what was kept before it stays kept.
//! - What is synced into a file that the next process does not find is not kept. So each sync is followed by a look at the
//!   file's path, and while anything is pending there is one each second, and one at the end. Where the file is gone, all of
//!   it moves to a new one; until that succeeds nothing counts as kept, and nothing new is reserved.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::disk::Disk;
use super::format::{Checksum, ENTRY_HEADER, Entry, FileHeader, HEADER, Kind};
use crate::backoff::Backoff;
use crate::telemetry::Metrics;

/// Most orders that share one sync.
const BATCH_MAX: usize = 64;

/// From this share of its room on, in eighths, a spill is full for new reservations: the rest is for what runs.
const HIGH_EIGHTHS: u64 = 7;

/// How often the file is looked for while anything in it is pending.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Longest pause between two tries to make a new file; they double from [`LOOK_EVERY`].
const PAUSE_MAX: Duration = Duration::from_secs(8);

/// Who waits for an entry to be durable.
type Reply = oneshot::Sender<Result<Entry, NotKept>>;

/// What the thread is asked to do.
pub(super) enum Order {
    /// Make this body durable as an entry.
    Keep { kind: Kind, body: Vec<u8>, reply: Reply },
    /// This entry is no longer pending.
    Remove(Entry),
    /// The process ends. `reply` gets how many entries are left when that is done.
    Close { reply: oneshot::Sender<usize> },
}

/// Why an outcome was not kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotKept {
    #[error("the spill is full (store.spill.max_size)")]
    NoRoom,
    #[error("the disk did not take it: {0}")]
    Disk(String),
    #[error("the spill's file was taken away, and no new one can be made: {0}")]
    Gone(String),
    #[error("it could not be sealed: {0}")]
    Unsealed(String),
    #[error("the spill is closed")]
    Closed,
}

/// How full a spill is: what its thread says, and everybody may ask.
pub(super) struct Level {
    bytes_max: u64,
    bytes: AtomicU64,
    /// The file was taken away, and there is no new one yet.
    gone: AtomicBool,
    /// Outcomes that are pending in memory only.
    pub(super) unkept: AtomicU64,
    pub(super) metrics: Arc<Metrics>,
}

impl Level {
    pub(super) fn new(bytes_max: u64, metrics: Arc<Metrics>) -> Self {
        let (bytes, unkept, gone) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        Self { bytes_max, bytes, gone, unkept, metrics }
    }

    fn set(&self, entries: usize, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
        self.metrics.spill(entries as u64, bytes);
    }

    pub(super) fn is_high(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= self.bytes_max / 8 * HIGH_EIGHTHS
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
}

/// A file that was taken away, and in whose place none could be made.
struct Gone {
    /// What is in the way.
    why: String,
    /// From the last try to the next one.
    pause: Duration,
    backoff: Backoff,
}

pub(super) struct Writer {
    disk: Box<dyn Disk>,
    header: FileHeader,
    /// Where the next entry goes.
    end: u64,
    /// What is pending, by offset.
    pending: HashMap<u64, Checksum>,
    /// When the file was looked for last.
    looked: Instant,
    gone: Option<Gone>,
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
        let (pending, looked) = (HashMap::new(), Instant::now());
        Ok(Self { disk, header, end: HEADER, pending, looked, gone: None, level })
    }

    /// Works until the spill is closed or dropped.
    pub(super) fn run(mut self, orders: &Receiver<Order>) {
        let mut closed = None;
        while closed.is_none() {
            match self.next(orders) {
                Ok(order) => {
                    let more = orders.try_iter().take(BATCH_MAX - 1);
                    closed = self.batch(std::iter::once(order).chain(more));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.until_look() == Some(Duration::ZERO) {
                // The log reports the result, and the level shows it.
                drop(self.look());
            }
        }
        let left = self.end();
        if let Some(closed) = closed {
            // Nobody waits any more.
            closed.send(left).ok();
        }
    }

    /// Waits for an order, and no longer than until the file is to be looked for.
    fn next(&self, orders: &Receiver<Order>) -> Result<Order, RecvTimeoutError> {
        match self.until_look() {
            Some(left) => orders.recv_timeout(left),
            None => orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
        }
    }

    /// How long until the file is to be looked for. `None`: nobody would miss it.
    fn until_look(&self) -> Option<Duration> {
        let pause = match &self.gone {
            Some(gone) => gone.pause,
            None if self.pending.is_empty() => return None,
            None => LOOK_EVERY,
        };
        Some(pause.saturating_sub(self.looked.elapsed()))
    }

    /// Lets the file go, before that is reported. How many outcomes the next process finds.
    fn end(mut self) -> usize {
        let left = self.pending.len();
        if left == 0 {
            self.disk.remove();
            return 0;
        }
        if self.look().is_ok() {
            return left;
        }
        let path = self.disk.path().display();
        tracing::error!(
            outcomes = left, %path,
            "the process ends, its spill file was taken away, and no new one can be made: these outcomes are lost"
        );
        0
    }

    /// Sees to it that the next process finds the file: where it was taken away, all of it moves to a new one.
    fn look(&mut self) -> Result<(), NotKept> {
        self.looked = Instant::now();
        let Err(error) = self.disk.check_path() else {
            if self.gone.is_some() {
                let path = self.disk.path().display();
                tracing::warn!(%path, "the spill file is in its place again");
            }
            self.set_gone(None);
            return Ok(());
        };
        let (was, entries) = (self.disk.path().display().to_string(), self.pending.len());
        match self.disk.renew(&self.header.encode(), self.end) {
            Ok(()) => {
                let path = self.disk.path().display();
                tracing::error!(
                    was, %error, %path, entries,
                    "somebody removed, renamed or replaced the spill file: all that it held is in a new one"
                );
                self.set_gone(None);
                Ok(())
            }
            Err(cause) => {
                let why = cause.to_string();
                if self.gone.is_none() {
                    tracing::error!(
                        was, %error, why, entries,
                        "somebody removed, renamed or replaced the spill file, and no new one can be made: until one can, its \
                         outcomes are in memory only and nothing new is reserved; it is tried again and again"
                    );
                }
                let mut backoff = match self.gone.take() {
                    Some(gone) => gone.backoff,
                    None => Backoff::new(LOOK_EVERY, PAUSE_MAX),
                };
                let gone = Gone { why: why.clone(), pause: backoff.pause(), backoff };
                self.set_gone(Some(gone));
                Err(NotKept::Gone(why))
            }
        }
    }

    fn set_gone(&mut self, gone: Option<Gone>) {
        self.level.gone.store(gone.is_some(), Ordering::Relaxed);
        self.gone = gone;
    }

    /// Returns when all that was written is durable where the next process finds it.
    fn make_durable(&mut self) -> Result<(), NotKept> {
        self.disk.sync().map_err(|error| NotKept::Disk(error.to_string()))?;
        match (&self.gone, self.until_look()) {
            (Some(gone), Some(left)) if !left.is_zero() => Err(NotKept::Gone(gone.why.clone())),
            _ => self.look(),
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
        let results = self.keep(bodies);
        // Before the results are sent: a reader of the level afterwards sees at least these entries.
        self.level.set(self.pending.len(), self.end - HEADER);
        for (reply, result) in results {
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

    /// Makes the bodies durable; with a result for each of those who wait.
    fn keep(
        &mut self,
        bodies: Vec<(Kind, Vec<u8>, Reply)>,
    ) -> Vec<(Reply, Result<Entry, NotKept>)> {
        let begun = self.end;
        let mut results = Vec::with_capacity(bodies.len());
        for (kind, body, reply) in bodies {
            let written = self.write(kind, &body);
            if let Ok(entry) = &written {
                self.end = entry.end();
            }
            results.push((reply, written));
        }
        let durable = if self.end == begun { Ok(()) } else { self.make_durable() };
        if let Err(why) = durable {
            // What of it is durable nobody knows. Where it cannot be cut off, what follows is written behind it.
            if self.disk.truncate(begun).is_ok() {
                self.end = begun;
            }
            let lost = |result: Result<Entry, NotKept>| result.and_then(|_| Err(why.clone()));
            return results.into_iter().map(|(reply, result)| (reply, lost(result))).collect();
        }
        let kept = results.iter().filter_map(|(_, result)| result.as_ref().ok());
        self.pending.extend(kept.map(|entry| (entry.offset, entry.checksum)));
        results
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
    use std::path::Path;
    use std::sync::mpsc;

    use uuid::Uuid;

    use super::*;
    use crate::identity::Astray;

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
        /// Somebody took it away.
        gone: bool,
        /// And there can be no new one.
        unrenewable: bool,
        /// How often a new one was tried.
        renewals: usize,
        /// Told of each new one.
        renewed: Option<mpsc::Sender<()>>,
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

        fn path(&self) -> &Path {
            Path::new("paper")
        }

        fn check_path(&self) -> Result<(), Astray> {
            if self.0.lock().gone { Err(Astray::Replaced) } else { Ok(()) }
        }

        fn renew(&mut self, header: &[u8], end: u64) -> io::Result<()> {
            let mut sheet = self.0.lock();
            sheet.renewals += 1;
            if sheet.unrenewable {
                return Err(io::ErrorKind::ReadOnlyFilesystem.into());
            }
            sheet.bytes[..header.len()].copy_from_slice(header);
            sheet.bytes.truncate(usize::try_from(end).unwrap());
            sheet.gone = false;
            if let Some(renewed) = &sheet.renewed {
                renewed.send(()).unwrap();
            }
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

    /// Has these kept in one batch; the result of each.
    fn keep(writer: &mut Writer, bodies: &[&[u8]]) -> Vec<Result<Entry, NotKept>> {
        let (orders, replies): (Vec<_>, Vec<_>) = bodies
            .iter()
            .map(|body| {
                let (reply, results) = oneshot::channel();
                (Order::Keep { kind: Kind::Outcome, body: body.to_vec(), reply }, results)
            })
            .unzip();
        writer.batch(orders.into_iter());
        replies.into_iter().map(|mut results| results.try_recv().unwrap()).collect()
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
        let results = keep(&mut writer, &[b"one", b"two", b"three"]);
        assert!(results.iter().all(Result::is_ok));
        assert_eq!(paper.0.lock().syncs, 2, "the header's, and theirs");
        assert_eq!(found(&paper, &header), [b"one".to_vec(), b"two".to_vec(), b"three".to_vec()]);
    }

    #[test]
    fn what_is_removed_is_not_found_and_the_room_is_free_when_nothing_is_pending() {
        let (paper, mut writer, header) = writer(1000);
        let results: Vec<Entry> =
            keep(&mut writer, &[b"one", b"two"]).into_iter().map(Result::unwrap).collect();
        writer.batch(std::iter::once(Order::Remove(results[0])));
        assert_eq!(found(&paper, &header), [b"two".to_vec()]);
        assert_eq!(writer.pending.len(), 1);
        writer.batch(std::iter::once(Order::Remove(results[1])));
        assert_eq!(paper.0.lock().bytes.len() as u64, HEADER);
        assert!(keep(&mut writer, &[&[1; 900]])[0].is_ok(), "all of the room is there again");
    }

    #[test]
    fn what_does_not_fit_is_refused_and_what_fits_is_kept() {
        let (paper, mut writer, header) = writer(100);
        let results = keep(&mut writer, &[&[1; 60], &[2; 60], &[3; 5]]);
        assert!(
            matches!(results[..], [Ok(_), Err(NotKept::NoRoom), Err(NotKept::NoRoom)]),
            "{results:?}"
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
    fn what_is_synced_into_a_file_that_was_taken_away_counts_once_all_is_in_a_new_one() {
        let (paper, mut writer, header) = writer(1000);
        assert!(keep(&mut writer, &[b"before"])[0].is_ok());
        assert_eq!(paper.0.lock().renewals, 0);
        paper.0.lock().gone = true;
        assert!(keep(&mut writer, &[b"after"])[0].is_ok());
        assert_eq!(paper.0.lock().renewals, 1);
        assert!(!writer.level.is_gone());
        assert_eq!(found(&paper, &header), [b"before".to_vec(), b"after".to_vec()]);
    }

    #[test]
    fn while_no_new_file_can_be_made_nothing_counts_as_kept_and_it_is_tried_with_a_pause() {
        let (paper, mut writer, header) = writer(1000);
        assert!(keep(&mut writer, &[b"before"])[0].is_ok());
        {
            let mut sheet = paper.0.lock();
            (sheet.gone, sheet.unrenewable) = (true, true);
        }
        for _ in 0..3 {
            assert!(matches!(keep(&mut writer, &[b"lost"])[0], Err(NotKept::Gone(_))));
            assert_eq!(paper.0.lock().renewals, 1, "the pause is not over");
            assert!(writer.level.is_gone());
            // However long this machine sleeps.
            writer.looked = Instant::now() + Duration::from_secs(60);
        }
        for longest in [1, 2, 4, 8, 8].map(Duration::from_secs) {
            let pause = writer.gone.as_ref().unwrap().pause;
            assert!(longest / 2 <= pause && pause <= longest, "{pause:?} of {longest:?}");
            assert!(writer.look().is_err());
        }
        paper.0.lock().unrenewable = false;
        writer.look().unwrap();
        assert!(!writer.level.is_gone());
        assert!(keep(&mut writer, &[b"after"])[0].is_ok());
        assert_eq!(found(&paper, &header), [b"before".to_vec(), b"after".to_vec()]);
    }

    #[test]
    fn a_file_that_is_in_its_place_again_needs_no_new_one() {
        let (paper, mut writer, header) = writer(1000);
        {
            let mut sheet = paper.0.lock();
            (sheet.gone, sheet.unrenewable) = (true, true);
        }
        assert!(keep(&mut writer, &[b"lost"])[0].is_err());
        assert!(writer.until_look().is_some(), "also where nothing is pending");
        paper.0.lock().gone = false;
        writer.look().unwrap();
        assert!(keep(&mut writer, &[b"after"])[0].is_ok());
        assert_eq!(paper.0.lock().renewals, 1);
        assert_eq!(found(&paper, &header), [b"after".to_vec()]);
        assert!(!writer.level.is_gone());
    }

    #[test]
    fn a_file_that_is_taken_away_after_its_sync_is_missed_while_anything_is_pending() {
        let (paper, mut writer, header) = writer(1000);
        assert_eq!(writer.until_look(), None, "nobody would miss it");
        assert!(keep(&mut writer, &[b"before"])[0].is_ok());
        let ((orders, queue), (renewed, renewals)) = (mpsc::channel(), mpsc::channel());
        {
            let mut sheet = paper.0.lock();
            (sheet.gone, sheet.renewed) = (true, Some(renewed));
        }
        let running = std::thread::spawn(move || writer.run(&queue));
        renewals.recv_timeout(Duration::from_secs(30)).expect("a new file, with no order");
        drop(orders);
        running.join().unwrap();
        assert_eq!(found(&paper, &header), [b"before".to_vec()]);
    }

    #[test]
    fn a_file_that_is_taken_away_is_missed_at_the_end() {
        let (paper, mut writer, header) = writer(1000);
        assert!(keep(&mut writer, &[b"before"])[0].is_ok());
        paper.0.lock().gone = true;
        let (orders, queue) = mpsc::channel();
        drop(orders);
        writer.run(&queue);
        let renewals = paper.0.lock().renewals;
        assert_eq!((renewals, found(&paper, &header)), (1, vec![b"before".to_vec()]));
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
