//! The background tasks as operators see them.

use serde::Serialize;

use crate::tasks::{self, Shown};

/// A background task. The field names are stable.
#[derive(Debug, Serialize)]
pub struct TaskView {
    /// Its name.
    pub name: &'static str,
    /// Its instance, such as the name of a sink.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub of: String,
    /// `running`; `pausing` before it is started again; `ended`, which ends the process.
    pub state: &'static str,
    /// Completed rounds.
    pub runs: u64,
    /// How long ago the last round ended, in seconds. `None`: no round has ended, or the task has no rounds.
    pub last_run_seconds_ago: Option<f64>,
    /// The last error.
    pub last_error: Option<String>,
    /// How long ago it happened, in seconds.
    pub last_error_seconds_ago: Option<f64>,
    /// How often it ended although nothing stopped it.
    pub ends: u64,
}

/// All tasks.
#[derive(Debug, Serialize)]
pub struct TaskPage {
    /// Ordered by name.
    pub tasks: Vec<TaskView>,
}

impl TaskPage {
    /// The present state of all tasks.
    #[must_use]
    pub fn now() -> Self {
        Self { tasks: tasks::all().into_iter().map(TaskView::of).collect() }
    }
}

impl TaskView {
    fn of(task: Shown) -> Self {
        let (last_error, since) = task.last_error.unzip();
        Self {
            name: task.name,
            of: task.of,
            state: task.state.as_str(),
            runs: task.runs,
            last_run_seconds_ago: task.last_run.map(|ago| ago.as_secs_f64()),
            last_error,
            last_error_seconds_ago: since.map(|ago| ago.as_secs_f64()),
            ends: task.ends,
        }
    }
}
