//! Writes the log through a bounded queue and a writer thread, so that logging never waits and never fails.
//!
//! Invariants:
//!
//! - A line that cannot be queued or written is lost and counted. It causes no panic, no wait and no error. A reader that
//!   stalls blocks the writer thread only.
//! - When lines can be written again, one line says how many were lost.
//! - A panic anywhere in the process is logged in the same way, and counted.
//!
//! The existing crates for this use `println!` at the end of the process, which panics on a closed pipe.
//!
//! A crash loses the queue. At a clean end [`flush`] waits for it for a bounded time.

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

/// The most lines, and bytes of lines, that wait for the writer. Further lines are lost.
const LINES_MAX: usize = 8192;
const BYTES_MAX: usize = 8 << 20;

/// How long the process waits at its end for lines that are not written yet.
const FLUSH_MAX: Duration = Duration::from_secs(1);

/// The pause between two tries to write to a non-blocking descriptor that is full.
const FULL_FIRST: Duration = Duration::from_millis(1);
const FULL_MAX: Duration = Duration::from_millis(100);

/// The format of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Text.
    Text,
    /// One JSON object on each line.
    Json,
}

fn lost() -> u64 {
    Loss::ALL.iter().map(|reason| lines_lost(*reason).get()).sum()
}

/// The process's log.
static LOG: OnceLock<Log> = OnceLock::new();

/// The sender of a log.
#[derive(Clone)]
struct Log(Arc<Queue>);

/// Lines on their way to the writer.
#[derive(Default)]
struct Queue {
    /// Locked for a push or a take, never for a write.
    waiting: Mutex<Waiting>,
    /// A line was queued.
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

    /// Takes all waiting lines. Waits if there is none.
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

/// The buffer for one log event. The subscriber writes to it; it is queued as one line.
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

/// Starts the log to standard error, also for panics. `RUST_LOG` overrides the level. Does nothing if there is a log.
///
/// # Errors
/// The writer thread cannot be started.
pub fn start(format: Format, level: &str) -> io::Result<()> {
    let log = Log::to(io::stderr())?;
    let filter = EnvFilter::try_from_default_env()
        .or_else(|_| EnvFilter::try_new(level))
        .unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(quiet(filter))
        .with_writer(log.clone())
        // It would report its own errors by `eprintln!`.
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

/// Waits at most a second until all lines that were logged before are written.
pub fn flush() {
    if let Some(log) = LOG.get() {
        log.flush();
    }
}

/// The NATS client logs each connection, and each reconnect that the relay refuses, as an error. The relay logs what matters,
/// so the client is silent unless the level names it.
fn quiet(filter: EnvFilter) -> EnvFilter {
    if filter.to_string().contains("async_nats") {
        return filter;
    }
    match "async_nats=off".parse() {
        Ok(directive) => filter.add_directive(directive),
        Err(_) => filter,
    }
}

/// Replaces the panic hook of the standard library, which waits for the reader of standard error.
fn tell_panic(panic: &PanicHookInfo<'_>) {
    panicked();
    let payload = panic.payload();
    let said = payload.downcast_ref::<&str>().copied();
    let said = said.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let said = said.unwrap_or("without a message");
    let place = panic.location().map_or_else(|| "?".to_owned(), ToString::to_string);
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or("?");
    // Captured only if RUST_BACKTRACE asks for it.
    let trace = Backtrace::capture();
    if trace.status() == BacktraceStatus::Captured {
        tracing::error!(%trace, "thread '{thread}' panicked at {place}: {said}");
    } else {
        tracing::error!("thread '{thread}' panicked at {place}: {said}");
    }
}

/// The writer behind the queue.
struct Writer<W> {
    out: W,
    /// The last line ended in the middle.
    torn: bool,
    /// The number of lost lines that were reported.
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
            // Queued as any other line, in the same format. If there is no room, the next report includes it.
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

    /// Like `write_all` of the standard library, but waits for a non-blocking descriptor.
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

/// Writes to a standard stream in its own thread, so that a reader that stalls blocks nothing. Errors are ignored. The channel
/// closes when the text is written.
pub fn aside(mut out: impl Write + Send + 'static, text: String) -> mpsc::Receiver<()> {
    let (done, written) = mpsc::channel();
    let writing = std::thread::Builder::new().name("output".to_owned()).spawn(move || {
        drop(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
        drop(done);
    });
    // Err: no thread can be started. There is no place to report it.
    drop(writing);
    written
}

/// Writes a line to standard error, and waits at most a second for the reader. For lines outside the log.
pub fn say(text: &str) {
    let written = aside(io::stderr(), format!("{text}\n"));
    // Err: written, or the time is over.
    written.recv_timeout(FLUSH_MAX).ok();
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// Takes half of each write and fails, until it is repaired. Then takes everything.
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

    /// Blocks every write until it is released.
    struct Stalled(mpsc::Receiver<()>, mpsc::Sender<usize>);

    impl Write for Stalled {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1.send(bytes.len()).unwrap();
            // Err: it is released for good.
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
        // From here on the writer thread is blocked in it.
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
