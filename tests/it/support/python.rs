//! Scripts with libraries from PyPI, as the world outside may have them.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

use super::process::PATIENCE;

/// The command line of a script of `tests/`, in the environment of `tests/requirements.txt`.
pub(crate) fn script(name: &str) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join("target/python/bin/python");
    assert!(
        python.exists(),
        "{} is missing: tests/all.sh makes it, or: python3 -m venv target/python && \
         target/python/bin/pip install -r tests/requirements.txt",
        python.display()
    );
    let mut command = Command::new(python);
    command.arg(root.join("tests").join(name));
    command
}

/// A script that runs beside the test; killed when dropped.
pub(crate) struct Running {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("python starts");
        let stdout = BufReader::new(child.stdout.take().expect("its output"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self { child, lines }
    }

    /// The next line that it writes.
    pub(crate) fn line(&self) -> String {
        let next = || self.lines.recv_timeout(PATIENCE).expect("the script says something");
        tokio::task::block_in_place(next)
    }
}
