//! One session, played, with a verdict and its check at every boundary.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crab_core::{Rebase, StateDelta};
use crab_examples::sandbox::{Config, ExecOptions, Sandbox, ScratchRoot, delete_root};
use crab_examples::session::{Session, quote};
use crab_inspector::Inspector;

use crate::files;
use crate::processes::Oracle;
use crate::table::Table;

/// Calls that take longer are cut off.
const PATIENCE: Duration = Duration::from_secs(15);

/// Snapshots that go when dropped, after the sandbox.
#[derive(Default)]
struct Snapshots {
    paths: Vec<PathBuf>,
    count: u32,
}

impl Snapshots {
    fn take(&mut self, root: &Path) -> Result<PathBuf, String> {
        self.count += 1;
        let path = root.with_extension(format!("s{}", self.count));
        let output = std::process::Command::new("btrfs")
            .args(["-q", "subvolume", "snapshot", "-r"])
            .args([root, &path])
            .output()
            .map_err(|error| format!("run btrfs: {error}"))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        self.paths.push(path.clone());
        Ok(path)
    }

    /// Deletes all but those that are still needed.
    fn keep(&mut self, needed: &[&Path]) {
        self.paths.retain(|path| needed.contains(&path.as_path()) || delete_root(path).is_err());
    }
}

impl Drop for Snapshots {
    fn drop(&mut self) {
        self.keep(&[]);
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

pub(crate) fn play(session: &Session, table: &mut Table) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().map_err(text)?;
    let inspector = Inspector::load().map_err(text)?;
    let mut snapshots = Snapshots::default();
    let root = ScratchRoot::new("accuracy").map_err(text)?;
    let id = format!("accuracy-{}", std::process::id()).parse().map_err(text)?;
    let sandbox = Sandbox::launch(Config::new(id, root.path())).map_err(text)?;
    let init = sandbox.init().ok_or("the sandbox did not start")?;
    prepare(&sandbox, &session.cwd)?;
    runtime.block_on(inspector.attach(&sandbox.describe())).map_err(text)?;
    let mut oracle = Oracle::new(sandbox.cgroup(), init)?;
    // The first version holds all.
    std::thread::sleep(Duration::from_millis(50));
    let mut base = frozen(&sandbox, || {
        let token = runtime.block_on(inspector.take(&sandbox.id())).token;
        let tree = snapshots.take(root.path())?;
        oracle.rebase()?;
        let rebase = Rebase { token, filesystem: true, process: true, tree: Some(tree.clone()) };
        runtime.block_on(inspector.rebase(&sandbox.id(), &rebase));
        Ok(tree)
    })?;
    for (turn, response) in session.responses.iter().enumerate() {
        for call in &response.calls {
            let cwd = PathBuf::from(&session.cwd);
            let options = ExecOptions { cwd, timeout: Some(PATIENCE), ..ExecOptions::default() };
            // What fails or takes too long had its effects all the same.
            let line = match call.input.get("content").and_then(|content| content.as_str()) {
                Some(patch) if call.tool == "apply_patch" => patch_command(patch),
                _ => call.shell(),
            };
            let _ = sandbox.exec_with(&line, &options);
        }
        let place = format!("{}, turn {}", session.name, turn + 1);
        base = frozen(&sandbox, || {
            let delta = runtime.block_on(inspector.take(&sandbox.id()));
            let tree = snapshots.take(root.path())?;
            let differing = files::differing(&base, &tree)?;
            let process = oracle.changed(&differing)?;
            let (said_files, said_processes) = (delta.filesystem.needs_checkpoint(), delta.process.needs_checkpoint());
            table.turns += 1;
            table.files.add(said_files, !differing.is_empty());
            table.processes.add(said_processes, process.is_some());
            if said_files == differing.is_empty() {
                let examples: BTreeSet<_> = differing.iter().take(3).collect();
                table.wrong.push(format!("{place}: files {}, truly {examples:?}", delta.filesystem));
            }
            if said_processes != process.is_some() {
                table.wrong.push(format!("{place}: processes {}, truly {process:?}", delta.process));
            }
            if said_processes {
                oracle.rebase()?;
            }
            if !said_files && !said_processes {
                table.skipped += 1;
                snapshots.keep(&[&base]);
                return Ok(base.clone());
            }
            // As an engine: the files are cheap and go with the processes.
            let rebase =
                Rebase { token: delta.token, filesystem: true, process: said_processes, tree: Some(tree.clone()) };
            runtime.block_on(inspector.rebase(&sandbox.id(), &rebase));
            snapshots.keep(&[&tree]);
            Ok(tree)
        })?;
    }
    runtime.block_on(inspector.detach(&sandbox.id()));
    sandbox.destroy().map_err(text)
}

fn frozen<T>(sandbox: &Sandbox, work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    sandbox.freeze().map_err(text)?;
    let done = work();
    sandbox.thaw().map_err(text)?;
    done
}

/// What a patch does, where the files that it is for are not there: each gets the lines that it adds.
fn patch_command(patch: &str) -> String {
    let mut command = String::new();
    let mut added: Option<(String, String)> = None;
    let mut finish = |added: Option<(String, String)>| {
        if let Some((path, text)) = added {
            let path = quote(&path);
            command.push_str(&format!("mkdir -p \"$(dirname {path})\"; printf %s {} >> {path}; ", quote(&text)));
        }
    };
    for line in patch.lines() {
        if let Some(head) = line.strip_prefix("*** ") {
            finish(added.take());
            added = ["Add File: ", "Update File: "]
                .iter()
                .find_map(|what| head.strip_prefix(what))
                .map(|path| (path.to_owned(), String::new()));
        } else if let (Some((_, text)), Some(line)) = (&mut added, line.strip_prefix('+')) {
            text.push_str(line);
            text.push('\n');
        }
    }
    finish(added);
    command + "true"
}

/// A stand-in for what the session began with: a repository with a few files.
fn prepare(sandbox: &Sandbox, cwd: &str) -> Result<(), String> {
    let cwd = quote(cwd);
    let line = format!(
        "mkdir -p {cwd} && cd {cwd} && mkdir -p src tests && echo '# project' > README.md \
         && echo 'print(1)' > src/main.py && {{ git init -q . && git add -A && \
         git -c user.name=a -c user.email=a@example.org commit -qm start; }} >/dev/null 2>&1; true"
    );
    sandbox.exec(&line).map(drop).map_err(text)
}
