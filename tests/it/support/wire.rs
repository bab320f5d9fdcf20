//! The wire between a gateway and its Postgres: passes everything on, until it is told to lose one statement, or the
//! server's answer to one, by the statement's name.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

/// What is lost, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// The statement: the server never sees it.
    Statement,
    /// The server's answer: it has done it, and committed.
    Answer,
}

type Plan = Arc<Mutex<Option<(String, Loss)>>>;

pub(crate) struct Wire {
    port: u16,
    plan: Plan,
    losses: watch::Receiver<usize>,
    _task: JoinSet<()>,
}

impl Wire {
    pub(crate) async fn start(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let plan = Plan::default();
        let (count, losses) = watch::channel(0);
        let mut task = JoinSet::new();
        let shared = Arc::clone(&plan);
        task.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(("127.0.0.1", to)).await else { continue };
                connections.spawn(pass(client, server, Arc::clone(&shared), count.clone()));
            }
        });
        Self { port, plan, losses, _task: task }
    }

    /// The database's URL over this wire.
    pub(crate) fn url(&self, url: &str, port: u16) -> String {
        url.replace(&format!(":{port}/"), &format!(":{}/", self.port))
    }

    /// Loses this the next time that the statement comes, and cuts the connection.
    pub(crate) fn lose(&self, statement: &str, loss: Loss) {
        *self.plan.lock().unwrap() = Some((statement.to_owned(), loss));
    }

    /// How many losses there were.
    pub(crate) fn losses(&self) -> usize {
        *self.losses.borrow()
    }
}

async fn pass(client: TcpStream, server: TcpStream, plan: Plan, count: watch::Sender<usize>) {
    // Whatever is lost, the caller sees a reset.
    client.set_zero_linger().unwrap();
    client.set_nodelay(true).unwrap();
    server.set_nodelay(true).unwrap();
    let ((from_client, to_client), (from_server, to_server)) =
        (client.into_split(), server.into_split());
    let (mute, answered) = (AtomicBool::new(false), Notify::new());
    tokio::select! {
        () = statements(from_client, to_server, &plan, &mute, &answered) => {}
        () = answers(from_server, to_client, &mute, &answered) => {}
    }
    if mute.load(Ordering::SeqCst) {
        count.send_modify(|count| *count += 1);
    }
}

/// Returns when the connection is to be cut.
async fn statements(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    plan: &Plan,
    mute: &AtomicBool,
    answered: &Notify,
) {
    let mut chunk = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut chunk).await {
        let loss = {
            let mut plan = plan.lock().unwrap();
            let hit = plan.as_ref().is_some_and(|(statement, _)| {
                chunk[..read].windows(statement.len()).any(|bytes| bytes == statement.as_bytes())
            });
            if hit { plan.take() } else { None }
        };
        mute.store(loss.is_some(), Ordering::SeqCst);
        if let Some((_, Loss::Statement)) = loss {
            return;
        }
        if to.write_all(&chunk[..read]).await.is_err() {
            return;
        }
        if loss.is_some() {
            return answered.notified().await;
        }
    }
}

async fn answers(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mute: &AtomicBool,
    answered: &Notify,
) {
    let mut chunk = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut chunk).await {
        if mute.load(Ordering::SeqCst) {
            answered.notify_one();
            return std::future::pending().await;
        }
        if to.write_all(&chunk[..read]).await.is_err() {
            return;
        }
    }
}
