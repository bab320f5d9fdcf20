//! The background tasks as operators see them.

use serde::Serialize;

use crate::tasks::{self, Shown};

/// A background task. Field names are promised.
#[derive(Debug, Serialize)]
pub struct TaskView {
    /// Its name.
    pub name: &'static str,
    /// Which of several: the sink's name, say.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub of: String,
    /// `running`; `pausing` before it is begun anew; `ended`, and the process ends.
    pub state: &'static str,
    /// Rounds that it has gone through.
    pub runs: u64,
    /// How long ago the last round ended, in seconds. None: there was none, or it has no rounds.
    pub last_run_seconds_ago: Option<f64>,
    /// What went wrong last.
    pub last_error: Option<String>,
    /// How long ago, in seconds.
    pub last_error_seconds_ago: Option<f64>,
    /// How often it ended though it was not told to.
    pub ends: u64,
}

/// All tasks.
#[derive(Debug, Serialize)]
pub struct TaskPage {
    /// By their names.
    pub tasks: Vec<TaskView>,
}

impl TaskPage {
    /// As they stand now.
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
