//! Where log lines go: through a bounded queue to a thread of their own, so that nobody who logs waits or fails.
//!
//! What must stay true:
//!
//! - A line that cannot be queued or written is lost and counted, and nothing else: no panic, no wait, no error. A reader
//!   that stalls holds up the writer's thread alone.
//! - Once lines can be written again, one of them says how many were lost.
//! - A panic anywhere in the process is such a line, and is counted.
//!
//! The writers that exist for this speak with `println!` at the end of the process, which panics where nobody reads any more.
//!
//! Dying here loses the queue; [`flush`] waits for it at a clean end, for a bounded time.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::panic::PanicHookInfo;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use super::labels::Loss;
use super::process::{lines_lost, panicked};

/// Most lines, and most bytes of lines, that wait for the writer. One more is lost.
const LINES_MAX: usize = 8192;
const BYTES_MAX: usize = 8 << 20;

/// How long the end of the process waits for lines that are not written yet.
const FLUSH_MAX: Duration = Duration::from_secs(1);

/// How often it is looked whether a descriptor that does not block takes more.
const FULL_FIRST: Duration = Duration::from_millis(1);
const FULL_MAX: Duration = Duration::from_millis(100);

/// How lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

fn lost() -> u64 {
    Loss::ALL.iter().map(|reason| lines_lost(*reason).get()).sum()
}

/// The process's log.
static LOG: OnceLock<Log> = OnceLock::new();

/// The near end of a log.
#[derive(Clone)]
struct Log(Arc<Queue>);

/// Lines on their way to the writer.
#[derive(Default)]
struct Queue {
    /// Locked for a push or a take, never for a write.
    waiting: Mutex<Waiting>,
    /// A line has come.
    come: Condvar,
    /// The last line is written, or lost.
    idle: Condvar,
}

#[derive(Default)]
struct Waiting {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// The writer has taken lines that are not written yet.
    writing: bool,
}

impl Queue {
    fn push(&self, line: &[u8]) {
        let mut waiting = self.waiting.lock();
        let bytes = waiting.bytes.saturating_add(line.len());
        if waiting.lines.len() >= LINES_MAX || bytes > BYTES_MAX {
            drop(waiting);
            lines_lost(Loss::QueueFull).inc();
            return;
        }
        waiting.bytes = bytes;
        waiting.lines.push_back(line.to_vec());
        drop(waiting);
        self.come.notify_one();
    }

    /// All that waits; waits for a line itself.
    fn take(&self) -> VecDeque<Vec<u8>> {
        let mut waiting = self.waiting.lock();
        waiting.writing = false;
        if waiting.lines.is_empty() {
            self.idle.notify_all();
        }
        self.come.wait_while(&mut waiting, |waiting| waiting.lines.is_empty());
        waiting.writing = true;
        waiting.bytes = 0;
        std::mem::take(&mut waiting.lines)
    }
}

/// What the subscriber writes an event to, as one piece.
struct Line(Arc<Queue>);

impl Write for Line {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line(Arc::clone(&self.0))
    }
}

impl Log {
    fn to(out: impl Write + Send + 'static) -> io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let lines = Arc::clone(&queue);
        let mut writer = Writer { out, torn: false, told: lost() };
        std::thread::Builder::new().name("log".to_owned()).spawn(move || {
            loop {
                lines.take().iter().for_each(|line| writer.put(line));
            }
        })?;
        Ok(Self(queue))
    }

    fn flush(&self) {
        let busy = |waiting: &mut Waiting| waiting.writing || !waiting.lines.is_empty();
        self.0.idle.wait_while_for(&mut self.0.waiting.lock(), busy, FLUSH_MAX);
    }
}

/// Logs to standard error from here on, panics too; `RUST_LOG` overrides the level. Nothing changes where
/// there is a log already.
///
/// # Errors
/// Where the writer cannot be started.
pub fn start(format: Format, level: &str) -> io::Result<()> {
    let log = Log::to(io::stderr())?;
    let filter = EnvFilter::try_from_default_env()
        .or_else(|_| EnvFilter::try_new(level))
        .unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(quiet(filter))
        .with_writer(log.clone())
        // It would speak of its own errors by `eprintln!`.
        .log_internal_errors(false);
    let started = match format {
        Format::Json => builder.json().try_init(),
        Format::Text => builder.with_ansi(io::stderr().is_terminal()).try_init(),
    };
    if started.is_ok() && LOG.set(log).is_ok() {
        std::panic::set_hook(Box::new(tell_panic));
    }
    Ok(())
}

/// Waits until everything is written that was logged before, for a second at most.
pub fn flush() {
    if let Some(log) = LOG.get() {
        log.flush();
    }
}

/// The client of NATS speaks of each of its connections, and of the reconnecting that is not wanted of it, as of errors.
/// The relay says what matters. Who asks for more by name gets it.
fn quiet(filter: EnvFilter) -> EnvFilter {
    if filter.to_string().contains("async_nats") {
        return filter;
    }
    match "async_nats=off".parse() {
        Ok(directive) => filter.add_directive(directive),
        Err(_) => filter,
    }
}

/// In place of the standard library's hook, which writes to standard error itself and waits for its reader.
fn tell_panic(panic: &PanicHookInfo<'_>) {
    panicked();
    let payload = panic.payload();
    let said = payload.downcast_ref::<&str>().copied();
    let said = said.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let said = said.unwrap_or("without a message");
    let place = panic.location().map_or_else(|| "?".to_owned(), ToString::to_string);
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or("?");
    // Taken where RUST_BACKTRACE asks for it.
    let trace = Backtrace::capture();
    if trace.status() == BacktraceStatus::Captured {
        tracing::error!(%trace, "thread '{thread}' panicked at {place}: {said}");
    } else {
        tracing::error!("thread '{thread}' panicked at {place}: {said}");
    }
}

/// The far end of the queue.
struct Writer<W> {
    out: W,
    /// The last line ended in the middle.
    torn: bool,
    /// So many lost lines have been told of.
    told: u64,
}

impl<W: Write> Writer<W> {
    fn put(&mut self, line: &[u8]) {
        if self.write(line).is_err() {
            lines_lost(Loss::WriteFailed).inc();
            return;
        }
        let lost = lost();
        let lines = lost.saturating_sub(self.told);
        if lines > 0 {
            self.told = lost;
            // Queued like any other, in the format of all; where there is no room for it, it is the next to be told.
            tracing::warn!(lines, "log lines were lost: standard error could not be written");
        }
    }

    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        if self.torn {
            self.write_all(b"\n")?;
            self.torn = false;
        }
        self.write_all(line)?;
        self.out.flush()
    }

    /// As the standard library's; a descriptor that does not block is waited for.
    fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let mut pause = FULL_FIRST;
        while !bytes.is_empty() {
            match self.out.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => {
                    bytes = bytes.get(written..).unwrap_or_default();
                    self.torn = !bytes.is_empty();
                    pause = FULL_FIRST;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(FULL_MAX);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Writes to a standard stream in a thread of its own, so that a reader that stalls keeps nobody; errors are nobody's. The
/// receiver ends when it is written.
pub fn aside(mut out: impl Write + Send + 'static, text: String) -> mpsc::Receiver<()> {
    let (done, written) = mpsc::channel();
    let writing = std::thread::Builder::new().name("output".to_owned()).spawn(move || {
        drop(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
        drop(done);
    });
    // Err: there is no thread to be had, and nobody to be told.
    drop(writing);
    written
}

/// Writes a line of a command to standard error, its last words say, and waits for the reader a second at most.
pub fn say(text: &str) {
    let written = aside(io::stderr(), format!("{text}\n"));
    // Err: written, or the time is over.
    written.recv_timeout(FLUSH_MAX).ok();
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// Takes half of what it gets and fails, until it is mended; then takes all.
    #[derive(Clone, Default)]
    struct Disk {
        mended: Arc<AtomicBool>,
        kept: Arc<Mutex<Vec<u8>>>,
        writes: usize,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.writes += 1;
            let whole = self.mended.load(Ordering::SeqCst);
            if !whole && self.writes.is_multiple_of(2) {
                return Err(ErrorKind::StorageFull.into());
            }
            let taken = if whole { bytes.len() } else { bytes.len() / 2 };
            self.kept.lock().extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_that_was_torn_is_ended_before_the_next_one() {
        let disk = Disk::default();
        let mut writer = Writer { out: disk.clone(), torn: false, told: lost() };
        writer.put(b"first line\n");
        disk.mended.store(true, Ordering::SeqCst);
        writer.put(b"second\n");
        assert_eq!(String::from_utf8_lossy(&disk.kept.lock()), "first\nsecond\n");
    }

    /// Holds every write until it may go on.
    struct Stalled(mpsc::Receiver<()>, mpsc::Sender<usize>);

    impl Write for Stalled {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1.send(bytes.len()).unwrap();
            // Err: it may go on for good.
            self.0.recv().ok();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_stalls_costs_lines_and_never_a_wait() {
        let (go, gone) = mpsc::channel();
        let (writes, written) = mpsc::channel();
        let log = Log::to(Stalled(gone, writes)).unwrap();
        let full = || lines_lost(Loss::QueueFull).get();
        let before = full();
        let mut line = log.make_writer();
        line.write_all(b"the first\n").unwrap();
        // The writer hangs in it from here on.
        assert_eq!(written.recv().unwrap(), 10);
        for _ in 0..LINES_MAX + 7 {
            line.write_all(b"another\n").unwrap();
        }
        assert!(full() >= before + 7, "{} lost", full() - before);
        drop(go);
        log.flush();
        assert_eq!(written.iter().take(LINES_MAX).sum::<usize>(), 8 * LINES_MAX);
    }

    #[test]
    fn lines_are_bounded_by_their_bytes_too() {
        let queue = Queue::default();
        let line = vec![b'x'; BYTES_MAX / 2];
        (0..3).for_each(|_| queue.push(&line));
        assert_eq!(queue.waiting.lock().lines.len(), 2);
    }
}
