//! A TCP proxy with a stable port before anything, Postgres say, that can refuse, hang, cut, and swallow what the server answers.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::raw::find;

/// The proxy. It takes no more connections once it is dropped.
pub struct Fault {
    pub addr: SocketAddr,
    switches: Arc<Switches>,
    accepting: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Switches {
    /// New connections are reset.
    refuses: AtomicBool,
    /// New connections are taken, and nothing comes of them.
    hangs: AtomicBool,
    /// What is sent next with these bytes in it arrives, and is never answered.
    unanswered: Mutex<Option<Vec<u8>>>,
    /// Each change resets what is open.
    cuts: watch::Sender<u64>,
}

impl Drop for Fault {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Fault {
    /// Before `server`, on a port of its own.
    pub async fn before(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("its address");
        let switches = Arc::new(Switches::default());
        let ours = Arc::clone(&switches);
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, server, Arc::clone(&ours)));
            }
        });
        Self { addr, switches, accepting }
    }

    /// Before the Postgres of this port; also the URL of a database behind it, made from its own.
    pub async fn before_postgres(url: &str, port: u16) -> (Self, String) {
        let fault = Self::before(SocketAddr::from(([127, 0, 0, 1], port))).await;
        let url = url.replace(&format!("127.0.0.1:{port}/"), &format!("{}/", fault.addr));
        (fault, url)
    }

    /// From now on nobody gets a connection. What is open stays open, see [`Fault::cut`].
    pub fn refuse(&self) {
        self.switches.refuses.store(true, Ordering::SeqCst);
    }

    /// From now on a new connection is taken and leads nowhere. What is open stays open.
    pub fn hang(&self) {
        self.switches.hangs.store(true, Ordering::SeqCst);
    }

    /// From now on everything goes through.
    pub fn pass(&self) {
        self.switches.hangs.store(false, Ordering::SeqCst);
        self.switches.refuses.store(false, Ordering::SeqCst);
    }

    /// Resets what is open.
    pub fn cut(&self) {
        self.switches.cuts.send_modify(|count| *count += 1);
    }

    /// The next connection on which a client sends these bytes carries them to the server, and nothing back any more.
    pub fn swallow_the_answer_to(&self, bytes: &str) {
        *self.switches.unanswered.lock().expect("the switch") = Some(bytes.as_bytes().to_vec());
    }

    /// Whether that has happened.
    pub fn has_swallowed(&self) -> bool {
        self.switches.unanswered.lock().expect("the switch").is_none()
    }
}

impl Switches {
    fn takes_the_answer_to(&self, sent: &[u8]) -> bool {
        let mut wanted = self.unanswered.lock().expect("the switch");
        let found = wanted.as_ref().is_some_and(|bytes| find(sent, bytes).is_some());
        if found {
            *wanted = None;
        }
        found
    }
}

async fn carry(client: TcpStream, server: SocketAddr, switches: Arc<Switches>) {
    let mut cuts = switches.cuts.subscribe();
    drop(client.set_zero_linger());
    if switches.refuses.load(Ordering::SeqCst) {
        return;
    }
    if switches.hangs.load(Ordering::SeqCst) {
        drop(cuts.changed().await);
        return;
    }
    let Ok(server) = TcpStream::connect(server).await else { return };
    drop((client.set_nodelay(true), server.set_nodelay(true)));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let silent = AtomicBool::new(false);
    let asks = |sent: &[u8]| {
        if switches.takes_the_answer_to(sent) {
            silent.store(true, Ordering::SeqCst);
        }
        true
    };
    let answers = |_: &[u8]| !silent.load(Ordering::SeqCst);
    tokio::select! {
        // Dropping all halves resets the client's connection.
        _ = cuts.changed() => {}
        () = pump(from_client, to_server, asks) => {}
        () = pump(from_server, to_client, answers) => {}
    }
}

/// Carries bytes one way; those that `arrives` denies vanish.
async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, arrives: impl Fn(&[u8]) -> bool) {
    let mut chunk = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut chunk).await {
        let carried = &chunk[..read];
        if arrives(carried) && to.write_all(carried).await.is_err() {
            return;
        }
    }
}
