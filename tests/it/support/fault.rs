//! A TCP proxy with a stable port before anything, Postgres say, that can refuse, hang, cut, stall, swallow what the server
//! answers, and not be there.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::raw::find;
use super::signals;

/// The proxy. It takes no more connections once it is dropped.
pub struct Fault {
    pub addr: SocketAddr,
    server: SocketAddr,
    switches: Arc<Switches>,
    accepting: Mutex<Option<JoinHandle<()>>>,
    /// Bound to the port, and never listening: so it stays ours while nobody listens.
    _holder: TcpSocket,
}

#[derive(Default)]
struct Switches {
    /// New connections are reset.
    refuses: AtomicBool,
    /// New connections are taken, and nothing comes of them.
    hangs: AtomicBool,
    /// What comes is read and not passed on, either way.
    stalls: watch::Sender<bool>,
    /// What is sent next with these bytes in it arrives, and is never answered.
    unanswered: Mutex<Option<Vec<u8>>>,
    /// Each change resets what is open.
    cuts: watch::Sender<u64>,
}

impl Drop for Fault {
    fn drop(&mut self) {
        if let Some(accepting) = signals::locked(&self.accepting).take() {
            accepting.abort();
        }
    }
}

/// A socket on this port, beside others of this process.
fn socket(addr: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_reuseport(true).expect("a port for two");
    socket.bind(addr).expect("a port");
    socket
}

impl Fault {
    /// Before `server`, on a port of its own.
    pub async fn before(server: SocketAddr) -> Self {
        let holder = socket(([127, 0, 0, 1], 0).into());
        let addr = holder.local_addr().expect("its address");
        let switches = Arc::default();
        let fault = Self { addr, server, switches, accepting: Mutex::default(), _holder: holder };
        fault.listen();
        fault
    }

    /// Listens, again.
    pub fn listen(&self) {
        let listener: TcpListener = socket(self.addr).listen(1024).expect("a listener");
        let (server, switches) = (self.server, Arc::clone(&self.switches));
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, server, Arc::clone(&switches)));
            }
        });
        *self.accepting.lock().expect("the task") = Some(accepting);
    }

    /// From now on nobody listens: new connections are refused, as by a server that is down. What is open stays open.
    pub async fn stop_listening(&self) {
        let accepting = self.accepting.lock().expect("the task").take();
        if let Some(accepting) = accepting {
            accepting.abort();
            drop(accepting.await);
        }
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

    /// From now on nothing goes through, and no connection ends of it.
    pub fn stall(&self) {
        self.switches.stalls.send_replace(true);
    }

    /// From now on everything goes through, and what was stalled too.
    pub fn pass(&self) {
        self.switches.hangs.store(false, Ordering::SeqCst);
        self.switches.refuses.store(false, Ordering::SeqCst);
        self.switches.stalls.send_replace(false);
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
        () = pump(from_client, to_server, &switches, asks) => {}
        () = pump(from_server, to_client, &switches, answers) => {}
    }
}

/// Carries bytes one way; those that `arrives` denies vanish.
async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    switches: &Switches,
    arrives: impl Fn(&[u8]) -> bool,
) {
    let mut chunk = vec![0; 64 * 1024];
    let mut stalls = switches.stalls.subscribe();
    while let Ok(read @ 1..) = from.read(&mut chunk).await {
        // The sender lives as long as the switches do.
        drop(stalls.wait_for(|stalled| !stalled).await);
        let carried = &chunk[..read];
        if arrives(carried) && to.write_all(carried).await.is_err() {
            return;
        }
    }
}
