//! Message brokers for the tests: the servers of Debian's packages, each in a folder of its own on a free port, to be
//! killed and started again; and what their streams hold.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use async_nats::{Client, ConnectOptions, HeaderMap};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::process::{PATIENCE, eventually, free_port};
use super::signals;

/// A server process on one port. Killed when dropped.
pub(crate) struct Server {
    command: Mutex<Command>,
    child: Mutex<Option<Child>>,
    folder: TempDir,
    pub(crate) port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill9();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.folder.path().join("log"));
            eprintln!("--- the broker on {}:\n{}", self.port, log.unwrap_or_default());
        }
    }
}

impl Server {
    /// `program` with the arguments that `with` makes of its folder and port; not started.
    fn new(program: &str, with: impl FnOnce(&Path, u16) -> Vec<String>) -> Self {
        let (folder, port) = (TempDir::new().unwrap(), free_port());
        let mut command = Command::new(find(program));
        command.args(with(folder.path(), port)).stdin(Stdio::null());
        Self { command: Mutex::new(command), child: Mutex::new(None), folder, port }
    }

    pub(crate) fn start(&self) {
        let path = self.folder.path().join("log");
        let log = std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        let mut command = self.command.lock().unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let child = command.spawn().unwrap();
        *signals::locked(&self.child) = Some(child);
    }

    /// The process of the running server.
    pub(crate) fn pid(&self) -> u32 {
        signals::locked(&self.child).as_ref().expect("a running server").id()
    }

    /// SIGKILL, and waits for the end.
    pub(crate) fn kill9(&self) {
        if let Some(mut child) = signals::locked(&self.child).take() {
            signals::end(&mut child);
        }
    }
}

fn find(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = std::env::split_paths(&path).collect();
    // Where Debian keeps what only administrators start.
    places.push("/usr/sbin".into());
    let found = places.into_iter().map(|place| place.join(program)).find(|file| file.is_file());
    found.unwrap_or_else(|| {
        panic!("the tests need {program}, which is not installed: see tests/all.sh")
    })
}

/// A NATS server with JetStream.
pub(crate) struct Nats {
    pub(crate) server: Server,
    options: fn() -> ConnectOptions,
}

/// A message of a stream.
pub(crate) struct Kept {
    pub(crate) subject: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl Kept {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).unwrap_or_else(|| panic!("no {name}")).as_str()
    }
}

impl Nats {
    /// With more lines of its configuration; not started. The tests' own client logs in by `options`.
    pub(crate) fn new(more: &str, options: fn() -> ConnectOptions) -> Self {
        let server = Server::new("nats-server", |folder, port| {
            let file = folder.join("nats.conf");
            let store = folder.join("streams");
            let text = format!(
                "listen: \"127.0.0.1:{port}\"\njetstream {{ store_dir: {:?} }}\n{more}\n",
                store.display()
            );
            std::fs::write(&file, text).unwrap();
            vec!["-c".into(), file.display().to_string()]
        });
        Self { server, options }
    }

    /// Started, and serving.
    pub(crate) async fn start(more: &str) -> Self {
        let nats = Self::new(more, ConnectOptions::new);
        nats.server.start();
        nats.client().await;
        nats
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://localhost:{}", self.server.port)
    }

    /// A client, as soon as the server and its streams serve.
    pub(crate) async fn client(&self) -> Client {
        let client = std::cell::RefCell::new(None);
        eventually("the server serves", async || {
            let Ok(made) = (self.options)().connect(self.url()).await else { return false };
            let asked = made.request("$JS.API.INFO", "".into());
            let answered = tokio::time::timeout(Duration::from_secs(1), asked).await;
            *client.borrow_mut() = Some(made);
            answered.is_ok_and(|answer| answer.is_ok())
        })
        .await;
        client.into_inner().unwrap()
    }

    /// Asks the API of JetStream.
    pub(crate) async fn api(&self, verb: &str, question: &Value) -> Value {
        let subject = format!("$JS.API.{verb}");
        let answer =
            self.client().await.request(subject, question.to_string().into()).await.unwrap();
        let answer: Value = serde_json::from_slice(&answer.payload).unwrap();
        assert!(answer.get("error").is_none(), "{verb}: {answer}");
        answer
    }

    /// A stream in files that listens on `subjects`; with `more` of its configuration.
    pub(crate) async fn stream(&self, name: &str, subjects: &str, more: &Value) {
        let mut question = json!({
            "name": name, "subjects": [subjects], "storage": "file", "retention": "limits",
            "allow_direct": true, "num_replicas": 1,
        });
        let more = more.as_object().unwrap().clone();
        question.as_object_mut().unwrap().extend(more);
        self.api(&format!("STREAM.CREATE.{name}"), &question).await;
    }

    /// How many messages a stream holds.
    pub(crate) async fn count(&self, stream: &str) -> u64 {
        let info = self.api(&format!("STREAM.INFO.{stream}"), &json!({})).await;
        info["state"]["messages"].as_u64().unwrap()
    }

    /// All messages of a stream.
    pub(crate) async fn kept(&self, stream: &str) -> Vec<Kept> {
        let client = self.client().await;
        let mut all = Vec::new();
        for number in 1..=self.count(stream).await {
            let question = json!({ "seq": number }).to_string();
            let subject = format!("$JS.API.DIRECT.GET.{stream}");
            let message = client.request(subject, question.into()).await.unwrap();
            let headers = message.headers.unwrap();
            let subject = headers.get("Nats-Subject").unwrap().as_str().to_owned();
            all.push(Kept { subject, headers, body: message.payload.to_vec() });
        }
        all
    }
}

/// A Redis server that syncs each write.
pub(crate) struct Redis {
    pub(crate) server: Server,
}

/// An entry of a stream, by its fields.
pub(crate) type Entry = BTreeMap<String, String>;

impl Redis {
    /// With more of its arguments; not started.
    pub(crate) fn new(more: &[&str]) -> Self {
        let server = Server::new("redis-server", |folder, port| {
            let own = format!("--port {port} --bind 127.0.0.1 --dir {}", folder.display());
            let safe = "--save  --appendonly yes --appendfsync always";
            let words = own.split(' ').chain(safe.split(' ')).chain(more.iter().copied());
            words.map(str::to_owned).collect()
        });
        Self { server }
    }

    /// Started, and serving.
    pub(crate) async fn start(more: &[&str]) -> Self {
        let redis = Self::new(more);
        redis.server.start();
        redis.serves().await;
        redis
    }

    pub(crate) async fn serves(&self) {
        eventually("the server serves", async || self.try_ask(&["PING"]).await.is_ok()).await;
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://localhost:{}/0", self.server.port)
    }

    async fn try_ask(&self, words: &[&str]) -> redis::RedisResult<redis::Value> {
        let client = redis::Client::open(self.url())?;
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(PATIENCE));
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        let mut command = redis::Cmd::new();
        command.arg(words);
        command.query_async(&mut connection).await
    }

    /// Runs a command.
    pub(crate) async fn ask(&self, words: &[&str]) -> redis::Value {
        self.try_ask(words).await.unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    /// All entries of a stream.
    pub(crate) async fn entries(&self, stream: &str) -> Vec<Entry> {
        let found = self.ask(&["XRANGE", stream, "-", "+"]).await;
        let entries: Vec<(String, Entry)> = redis::from_redis_value(found).unwrap();
        entries.into_iter().map(|(_, fields)| fields).collect()
    }
}
