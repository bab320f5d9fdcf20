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

use tokio_postgres::SimpleQueryMessage;

use super::signals;

/// How long the server may take to start or stop.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running cluster. Its end is the process's end, or its drop.
pub(crate) struct Cluster {
    home: PathBuf,
    port: u16,
    settings: Vec<String>,
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
        Self::with(&[])
    }

    /// As [`Cluster::own`], with settings of the server, `max_connections=20` say.
    pub(crate) fn with(settings: &[&str]) -> Self {
        let mut initdb = command("initdb");
        initdb
            .args(["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C"])
            .args(["--no-sync", "--no-instructions"]);
        Self::make(initdb, settings)
    }

    /// A standby that streams from `primary`, and may be promoted.
    pub(crate) fn standby_of(primary: &Self) -> Self {
        let mut backup = command("pg_basebackup");
        backup
            .args(["--host=127.0.0.1", "--username=postgres", "--no-sync", "--checkpoint=fast"])
            .args(["--write-recovery-conf", "--wal-method=stream"])
            .arg(format!("--port={}", primary.port));
        Self::make(backup, &["hot_standby=on"])
    }

    fn make(mut maker: Command, settings: &[&str]) -> Self {
        let home = own_folder("pg");
        let guard = guard(&home);
        let made = maker.arg("--pgdata").arg(home.join("data")).output().unwrap();
        assert!(made.status.success(), "{maker:?}: {}", String::from_utf8_lossy(&made.stderr));
        let cluster = Self {
            home,
            port: free_port(),
            settings: settings.iter().map(|&setting| setting.to_owned()).collect(),
            server: Mutex::new(None),
            guard: Some(guard),
            databases: AtomicU32::new(0),
        };
        cluster.start();
        cluster
    }

    /// From now on nothing counts as committed here that a standby does not have. Needs a standby.
    pub(crate) fn replicate_synchronously(&self) {
        self.set("synchronous_standby_names = '*'");
        let end = Instant::now() + PATIENCE;
        let synchronous = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
        while self.ask("postgres", synchronous).as_deref() != Some("1") {
            assert!(Instant::now() < end, "no standby is in step");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Makes a standby the primary.
    pub(crate) fn promote(&self) {
        self.execute("postgres", "SELECT pg_promote()");
    }

    /// Changes a setting of the running server, as its administrator does.
    pub(crate) fn set(&self, setting: &str) {
        const LOADED: &str = "SELECT pg_conf_load_time()";
        let before = self.ask("postgres", LOADED);
        // Each statement alone: the first may not stand in a transaction.
        self.execute("postgres", &format!("ALTER SYSTEM SET {setting}"));
        self.execute("postgres", "SELECT pg_reload_conf()");
        let end = Instant::now() + PATIENCE;
        while self.ask("postgres", LOADED) == before {
            assert!(Instant::now() < end, "{setting} is not in force");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// From now on every role but the administrator needs its password.
    pub(crate) fn ask_for_passwords(&self) {
        let rules =
            "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n";
        std::fs::write(self.home.join("data/pg_hba.conf"), rules).unwrap();
        self.set("password_encryption = 'scram-sha-256'");
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
        self.ask(database, sql);
    }

    /// Runs SQL; the first cell of its result.
    pub(crate) fn ask(&self, database: &str, sql: &str) -> Option<String> {
        self.try_ask(database, sql).unwrap_or_else(|error| panic!("{sql}: {error:?}"))
    }

    /// Also from within a test's runtime, hence the thread.
    fn try_ask(&self, database: &str, sql: &str) -> Result<Option<String>, tokio_postgres::Error> {
        let (url, sql) = (self.url(database), sql.to_owned());
        let run = move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let (client, connection) =
                    tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
                let task = tokio::spawn(connection);
                let messages = client.simple_query(&sql).await;
                drop(client);
                task.await.unwrap()?;
                Ok(messages?.iter().find_map(|message| match message {
                    SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
                    SimpleQueryMessage::CommandComplete(_)
                    | SimpleQueryMessage::RowDescription(_)
                    | _ => None,
                }))
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
        for setting in &self.settings {
            server.args(["-c", setting]);
        }
        server.stdout(Stdio::null()).stderr(log).stdin(Stdio::null()).process_group(0);
        let server = server.spawn().unwrap();
        *signals::locked(&self.server) = Some(server);
        let end = Instant::now() + PATIENCE;
        while let Err(error) = self.try_ask("postgres", "SELECT 1") {
            assert!(Instant::now() < end, "no server: {error}\n{}", self.log());
            // After a kill the old shared memory may still be in use, and the server gives up: once more.
            let ended = |child: &mut Child| child.try_wait().ok().flatten().is_some();
            let gone = signals::locked(&self.server).as_mut().is_none_or(ended);
            std::thread::sleep(Duration::from_millis(50));
            if gone {
                return self.start();
            }
        }
    }

    /// Stops the server as a crash does (`-m immediate`): the next start recovers.
    pub(crate) fn stop_at_once(&self) {
        self.signal("QUIT");
    }

    /// Stops the server (`-m fast`): connections are closed, nothing is lost.
    pub(crate) fn stop(&self) {
        self.signal("INT");
    }

    /// Stops the server at once, without a shutdown: the next start recovers.
    pub(crate) fn crash(&self) {
        self.signal("QUIT");
    }

    /// Kills the server and all its processes.
    pub(crate) fn kill9(&self) {
        let pid = self.pid();
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        self.signal("KILL");
        for child in children.split_whitespace() {
            // Most have ended with their parent.
            let _gone = child.parse().is_ok_and(|child| signals::send(child, "KILL"));
        }
    }

    /// The process of the running server.
    pub(crate) fn pid(&self) -> u32 {
        signals::locked(&self.server).as_ref().expect("a running server").id()
    }

    /// Fails as a test does that has the server in its hands.
    pub(crate) fn fail_inside(&self) {
        let _held = self.server.lock();
        panic!("as it is meant to");
    }

    fn signal(&self, signal: &str) {
        // Also at the end of a test that failed: nothing here may fail it again.
        let Some(mut child) = signals::locked(&self.server).take() else { return };
        signals::send(child.id(), signal);
        let _ = child.wait();
    }

    /// What the server has logged. Each line begins with its database's name.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.home.join("log")).unwrap()).into_owned()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.signal("QUIT");
        if let Some(mut guard) = self.guard.take() {
            drop(guard.stdin.take());
            let _ = guard.wait();
        }
    }
}

/// A temporary folder that a server's user may write. Not removed by itself.
pub(crate) fn own_folder(name: &str) -> PathBuf {
    let home = tempfile::Builder::new().prefix(name).tempdir().unwrap().keep();
    if let Some((uid, gid)) = server_user() {
        std::os::unix::fs::chown(&home, Some(uid), Some(gid)).unwrap();
    }
    home
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
pub(crate) fn command(program: &str) -> Command {
    as_somebody(find(program))
}

/// A program, as an unprivileged user where the tests run as root.
pub(crate) fn as_somebody(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    if let Some((uid, gid)) = server_user() {
        command.uid(uid).gid(gid);
    }
    command.current_dir("/").env("LC_ALL", "C");
    command
}

fn find(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = std::env::split_paths(&path).collect();
    // Where Debian keeps what only administrators start.
    places.push("/usr/sbin".into());
    let mut versions: Vec<PathBuf> = std::fs::read_dir("/usr/lib/postgresql")
        .map(|entries| entries.flatten().map(|entry| entry.path().join("bin")).collect())
        .unwrap_or_default();
    versions.sort();
    versions.reverse();
    places.extend(versions);
    let found = places.into_iter().map(|place| place.join(program)).find(|file| file.is_file());
    found.unwrap_or_else(|| {
        panic!("the tests need {program}, which is not installed: see tests/all.sh")
    })
}

/// As root: the ids of an unprivileged user.
pub(crate) fn server_user() -> Option<(u32, u32)> {
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

/// The plans that the gateway's statements in a database were logged with, each with its statement. Others log at the same
/// time: a message ends where a line is not its own.
pub fn plans(log: &str, database: &str) -> Vec<String> {
    let start = format!("{database} oncegate LOG:  duration:");
    let (mut plans, mut mine) = (Vec::<String>::new(), false);
    for line in log.lines() {
        if !line.starts_with('\t') {
            mine = line.starts_with(&start);
            plans.extend(mine.then(String::new));
        }
        if let (true, Some(plan)) = (mine, plans.last_mut()) {
            plan.push_str(line);
            plan.push('\n');
        }
    }
    plans
}
