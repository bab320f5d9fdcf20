//! A private Postgres for the tests: a cluster in a temporary directory, on a free port of the loopback.
//!
//! The server dies and its directory vanishes when the test process ends, however it ends: a guard process waits
//! for the end of its standard input, which the kernel closes.

use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// How long the server may take to start or stop.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running cluster. Its end is the process's end, or its drop.
pub(crate) struct Cluster {
    home: PathBuf,
    port: u16,
    server: Mutex<Option<Child>>,
    guard: Option<Child>,
    databases: AtomicU32,
}

impl Cluster {
    /// The cluster that all tests of this process share. Never stop it.
    pub(crate) fn shared() -> &'static Self {
        static SHARED: OnceLock<Cluster> = OnceLock::new();
        SHARED.get_or_init(Self::own)
    }

    /// A cluster of one's own, to be stopped, killed and started on one stable port.
    pub(crate) fn own() -> Self {
        let home = tempfile::Builder::new().prefix("pg").tempdir().unwrap().keep();
        if let Some((uid, gid)) = server_user() {
            std::os::unix::fs::chown(&home, Some(uid), Some(gid)).unwrap();
        }
        let guard = guard(&home);
        let made = command("initdb")
            .arg("--pgdata")
            .arg(home.join("data"))
            .args(["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C"])
            .args(["--no-sync", "--no-instructions"])
            .output()
            .unwrap();
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        let cluster = Self {
            home,
            port: free_port(),
            server: Mutex::new(None),
            guard: Some(guard),
            databases: AtomicU32::new(0),
        };
        cluster.start();
        cluster
    }

    /// The port on 127.0.0.1.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The URL of a database by its name.
    pub(crate) fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// The URL of a fresh, empty database.
    pub(crate) fn database(&self) -> String {
        let name = format!("test{}", self.databases.fetch_add(1, Ordering::Relaxed));
        self.execute("postgres", &format!("CREATE DATABASE {name}"));
        self.url(&name)
    }

    /// Runs SQL in a database by its name.
    pub(crate) fn execute(&self, database: &str, sql: &str) {
        self.try_execute(database, sql).unwrap();
    }

    /// Also from within a test's runtime, hence the thread.
    fn try_execute(&self, database: &str, sql: &str) -> Result<(), tokio_postgres::Error> {
        let (url, sql) = (self.url(database), sql.to_owned());
        let run = move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let (client, connection) =
                    tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
                let task = tokio::spawn(connection);
                let result = client.batch_execute(&sql).await;
                drop(client);
                task.await.unwrap()?;
                result
            })
        };
        std::thread::spawn(run).join().unwrap()
    }

    /// Starts the server and waits until it serves.
    pub(crate) fn start(&self) {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.home.join("log"))
            .unwrap();
        let mut server = command("postgres");
        server.arg("-D").arg(self.home.join("data")).arg("-k").arg(&self.home);
        let port = format!("port={}", self.port);
        for setting in [
            port.as_str(),
            "listen_addresses=127.0.0.1",
            "max_connections=200",
            "shared_buffers=64MB",
            "log_line_prefix=%d %a ",
        ] {
            server.args(["-c", setting]);
        }
        server.stdout(Stdio::null()).stderr(log).stdin(Stdio::null()).process_group(0);
        *self.server.lock().unwrap() = Some(server.spawn().unwrap());
        let end = Instant::now() + PATIENCE;
        while let Err(error) = self.try_execute("postgres", "SELECT 1") {
            assert!(Instant::now() < end, "no server: {error}\n{}", self.log());
            // After a kill the old shared memory may still be in use, and the server gives up: once more.
            let mut server = self.server.lock().unwrap();
            let gone = server.as_mut().is_none_or(|child| child.try_wait().unwrap().is_some());
            drop(server);
            std::thread::sleep(Duration::from_millis(50));
            if gone {
                return self.start();
            }
        }
    }

    /// Stops the server: connections are closed, nothing is lost.
    pub(crate) fn stop(&self) {
        self.signal("-INT");
    }

    /// Stops the server at once, without a shutdown: the next start recovers.
    pub(crate) fn crash(&self) {
        self.signal("-QUIT");
    }

    /// Kills the server and all its processes.
    pub(crate) fn kill9(&self) {
        let pid = self.pid();
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        self.signal("-KILL");
        for child in children.split_whitespace() {
            // Most have ended with their parent.
            let _gone = Command::new("kill").args(["-KILL", child]).stderr(Stdio::null()).status();
        }
    }

    fn pid(&self) -> u32 {
        self.server.lock().unwrap().as_ref().unwrap().id()
    }

    fn signal(&self, signal: &str) {
        let mut server = self.server.lock().unwrap();
        let Some(mut child) = server.take() else { return };
        Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        child.wait().unwrap();
    }

    /// What the server has logged. Each line begins with its database's name.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.home.join("log")).unwrap()).into_owned()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.signal("-QUIT");
        if let Some(mut guard) = self.guard.take() {
            drop(guard.stdin.take());
            guard.wait().unwrap();
        }
    }
}

/// Ends the server and removes its directory once its standard input ends.
fn guard(home: &Path) -> Child {
    const SCRIPT: &str = r#"
        cat >/dev/null
        pid=$(head -n 1 "$1/data/postmaster.pid" 2>/dev/null)
        [ -n "$pid" ] && kill -QUIT "$pid" 2>/dev/null
        n=0
        while [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null && [ $n -lt 100 ]; do sleep 0.1; n=$((n + 1)); done
        rm -rf "$1"
    "#;
    Command::new("sh")
        .args(["-c", SCRIPT, "guard"])
        .arg(home)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap()
}

/// A program of Postgres, as a user that may run it: it refuses to run as root.
fn command(program: &str) -> Command {
    let mut command = Command::new(find(program));
    if let Some((uid, gid)) = server_user() {
        command.uid(uid).gid(gid);
    }
    command.current_dir("/").env("LC_ALL", "C");
    command
}

fn find(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let mut versions: Vec<PathBuf> = std::fs::read_dir("/usr/lib/postgresql")
        .map(|entries| entries.flatten().map(|entry| entry.path().join("bin")).collect())
        .unwrap_or_default();
    versions.sort();
    versions.reverse();
    places.extend(versions);
    let found = places.into_iter().map(|place| place.join(program)).find(|file| file.is_file());
    found.unwrap_or_else(|| panic!("the tests need a Postgres server: {program} is not installed"))
}

/// As root: the ids of an unprivileged user.
fn server_user() -> Option<(u32, u32)> {
    use std::os::unix::fs::MetadataExt as _;
    let me = std::fs::metadata("/proc/self").unwrap().uid();
    if me != 0 {
        return None;
    }
    let users = std::fs::read_to_string("/etc/passwd").unwrap();
    let ids = |name: &str| {
        let line = users.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut fields = line.split(':').skip(2);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    Some(ids("postgres").or_else(|| ids("nobody")).expect("a user to run Postgres as"))
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
