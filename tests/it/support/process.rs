//! The real program as a process: started, watched by its output, signalled and killed.

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::pipe::fcntl_setpipe_size;

use super::signals;

/// Longest wait for anything that must happen.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A port that was free a moment ago, for processes that must come back under the same address.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its address").port()
}

/// A running `oncegate serve`, or `oncegate relay`. Killed when dropped.
pub struct Gateway {
    child: Child,
    pub addr: SocketAddr,
    pub admin: SocketAddr,
    pub config: PathBuf,
    log: Arc<Mutex<String>>,
    ear: Arc<AtomicU8>,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.kill9();
        if std::thread::panicking() {
            eprintln!("--- output of the gateway on {}:\n{}", self.addr, self.log());
        }
    }
}

/// Writes a configuration into a folder and says where.
pub fn config(folder: &Path, toml: &str) -> PathBuf {
    let path = folder.join(format!("oncegate-{}.toml", free_port()));
    std::fs::write(&path, toml).expect("a configuration file");
    path
}

/// The command line of `serve`.
pub fn serve(config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["serve", "--config"]).arg(config);
    command
}

/// The command line of `relay`.
pub fn relay(config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["relay", "--config"]).arg(config);
    command
}

/// What is done with standard error: it is read, left alone for a while, or closed for good.
const READS: u8 = 0;
const STALLS: u8 = 1;
const CLOSED: u8 = 2;
const ENDED: u8 = 3;

/// Reads standard error, as far as it is listened to.
fn listen(mut stderr: ChildStderr, log: &Mutex<String>, ear: &AtomicU8) {
    let mut chunk = [0; 4096];
    while let Ok(read @ 1..) = stderr.read(&mut chunk) {
        let text = String::from_utf8_lossy(&chunk[..read]).into_owned();
        log.lock().expect("the log").push_str(&text);
        if ear.load(Ordering::SeqCst) == STALLS {
            // A page is soon full.
            let _ = fcntl_setpipe_size(&stderr, 4096);
        }
        while ear.load(Ordering::SeqCst) == STALLS {
            std::thread::sleep(Duration::from_millis(5));
        }
        if ear.load(Ordering::SeqCst) == CLOSED {
            return;
        }
    }
}

/// Starts a command; its output, and what its line says by which it is ready.
fn spawn(
    mut command: Command,
    config: &Path,
    stderr: Stdio,
    ear: &Arc<AtomicU8>,
) -> (Child, Arc<Mutex<String>>, mpsc::Receiver<String>) {
    let mut child = command
        // What is kept beside the database by default is kept in the test's own folder.
        .current_dir(config.parent().expect("a folder"))
        .env("RUST_BACKTRACE", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .expect("the program starts");
    // The test's own end of it, if it is one, is closed here.
    drop(command);
    let log = Arc::new(Mutex::new(String::new()));
    let stdout = child.stdout.take().expect("its output");
    let stderr = child.stderr.take();
    let (ready, line) = mpsc::channel();
    let out = Arc::clone(&log);
    std::thread::spawn(move || {
        for text in BufReader::new(stdout).lines().map_while(Result::ok) {
            if let Some(json) = text.strip_prefix("ready ") {
                let _ = ready.send(json.to_owned());
            }
            out.lock().expect("the log").push_str(&format!("{text}\n"));
        }
    });
    if let Some(stderr) = stderr {
        let (err, ear) = (Arc::clone(&log), Arc::clone(ear));
        std::thread::spawn(move || listen(stderr, &err, &ear));
    }
    (child, log, line)
}

impl Gateway {
    /// Starts `relay` with this configuration file and waits until it is ready.
    pub fn relay(config: &Path) -> Self {
        Self::launch(relay(config), config)
            .unwrap_or_else(|output| panic!("the relay did not start:\n{output}"))
    }

    /// Starts `serve` with this configuration file and waits until it is ready.
    pub fn start(config: &Path) -> Self {
        Self::try_start(config)
            .unwrap_or_else(|output| panic!("the gateway did not start:\n{output}"))
    }

    /// As [`Gateway::start`]; where it ends instead, its output.
    pub fn try_start(config: &Path) -> Result<Self, String> {
        Self::launch(serve(config), config)
    }

    /// As [`Gateway::start`], with faults at its fault points (`docs/testing.md`).
    pub fn with_fault(config: &Path, fault: &str) -> Self {
        Self::launch(faulty(serve(config), fault), config)
            .unwrap_or_else(|output| panic!("the gateway did not start:\n{output}"))
    }

    /// As [`Gateway::start`], with the test's own standard error and faults: its log is nowhere in this process.
    pub fn logging_to(stderr: impl Into<Stdio>, config: &Path, fault: &str) -> Self {
        Self::launch_with(faulty(serve(config), fault), config, stderr.into())
            .unwrap_or_else(|output| panic!("the gateway did not start:\n{output}"))
    }

    /// As [`Gateway::try_start`], by a command line of the test's own.
    pub fn launch(command: Command, config: &Path) -> Result<Self, String> {
        Self::launch_with(command, config, Stdio::piped())
    }

    fn launch_with(command: Command, config: &Path, stderr: Stdio) -> Result<Self, String> {
        let ear = Arc::default();
        let (mut child, log, line) = spawn(command, config, stderr, &ear);
        match line.recv_timeout(PATIENCE) {
            Ok(json) => {
                let ready: serde_json::Value = serde_json::from_str(&json).expect("a ready line");
                let read = |name: &str| Some(ready[name].as_str()?.parse().expect("an address"));
                let admin = read("admin").expect("an address");
                // A relay alone has no other.
                let addr = read("listen").unwrap_or(admin);
                Ok(Self { child, addr, admin, config: config.into(), log, ear })
            }
            Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                whole(&log);
                Err(log.lock().expect("the log").clone())
            }
        }
    }

    /// Starts a command that listens at these addresses, and does not wait until it is ready.
    pub fn unready(command: Command, config: &Path, addr: SocketAddr, admin: SocketAddr) -> Self {
        let ear = Arc::default();
        let (child, log, _) = spawn(command, config, Stdio::piped(), &ear);
        Self { child, addr, admin, config: config.into(), log, ear }
    }

    /// The same configuration again, after the process has ended.
    pub fn restart(&self) -> Self {
        Self::start(&self.config)
    }

    /// From the next line on nobody reads its log, and its pipe is soon full; or it is read again.
    pub fn stall_log(&self, stalls: bool) {
        self.ear.store(if stalls { STALLS } else { READS }, Ordering::SeqCst);
    }

    /// From the next line on its log has no reader any more.
    pub fn close_log(&self) {
        self.ear.store(CLOSED, Ordering::SeqCst);
    }

    /// Waits until its log says this: lines are written behind what they tell of.
    pub fn says(&self, text: &str) {
        let begun = Instant::now();
        while !self.log().contains(text) {
            assert!(begun.elapsed() < PATIENCE, "not in the log: {text}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// All output so far. Of a process that has ended it is whole.
    pub fn log(&self) -> String {
        signals::locked(&self.log).clone()
    }

    /// The most memory that the process ever had, in bytes.
    pub fn most_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.expect("the process lives");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("its peak");
        let kib = line.trim().split(' ').next().and_then(|text| text.parse::<u64>().ok());
        kib.expect("a number") * 1024
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, and waits for the end.
    pub fn kill9(&mut self) {
        // What it wrote is read all the same.
        let _ = self.ear.compare_exchange(STALLS, ENDED, Ordering::SeqCst, Ordering::SeqCst);
        signals::end(&mut self.child);
        whole(&self.log);
    }

    /// Sends a signal by its name, `TERM` say.
    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// SIGTERM.
    pub fn terminate(&self) {
        self.signal("TERM");
    }

    /// Waits for the end by SIGKILL, which a fault point brings.
    pub fn died(&mut self) {
        let status = self.exited();
        assert_eq!(status.signal(), Some(9), "{status}:\n{}", self.log());
    }

    /// Waits for the end.
    pub fn exited(&mut self) -> ExitStatus {
        let status = ended(&mut self.child);
        whole(&self.log);
        status.unwrap_or_else(|| panic!("the gateway did not end:\n{}", self.log()))
    }
}

/// Waits until both readers of an ended process's output have read it: each holds the log.
fn whole(log: &Arc<Mutex<String>>) {
    let ended = Instant::now();
    while Arc::strong_count(log) > 1 && ended.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends a signal by its name, `TERM` say.
pub fn signal(pid: u32, name: &str) {
    assert!(signals::send(pid, name), "the process takes signals");
}

/// Waits for a process's end; `None`: it does not come.
pub fn ended(child: &mut Child) -> Option<ExitStatus> {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        if let Some(status) = child.try_wait().expect("a process to wait for") {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}

/// The same command, with faults at its fault points; none where they are empty.
fn faulty(mut command: Command, fault: &str) -> Command {
    if !fault.is_empty() {
        command.env("ONCEGATE_FAULT", fault);
    }
    command
}

/// Runs the program with faults until it ends by itself: how, and its errors.
pub fn run_to_its_end(args: &[&str], fault: &str) -> (ExitStatus, String) {
    let mut child = faulty(Command::new(env!("CARGO_BIN_EXE_oncegate")), fault)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut stderr = child.stderr.take().expect("its errors");
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = stderr.read_to_string(&mut text);
        text
    });
    let status = ended(&mut child);
    let errors = errors.join().expect("the reader of its errors");
    let status = status.unwrap_or_else(|| panic!("{args:?} with {fault} did not end:\n{errors}"));
    (status, errors)
}

/// Runs a command of the program beside whatever runs: exit status, output, errors.
pub fn run(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("the program runs");
    (
        output.status.code().unwrap_or(-1),
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// Polls until `condition` holds; what must happen, happens within [`PATIENCE`].
pub async fn eventually<F: Future<Output = bool>>(what: &str, condition: impl FnMut() -> F) {
    super::happens(what, PATIENCE, condition).await;
}
