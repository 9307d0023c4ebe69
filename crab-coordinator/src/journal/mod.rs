//! The journal: every turn and its answer, on disk.
//!
//! ```text
//! <journal>/lock                                    held while a coordinator runs
//! <journal>/<sandbox>/index                         one line for each thing that happened to a turn
//! <journal>/<sandbox>/<turn>.<attempt>.answer       one answer
//! ```
//!
//! Directories are 0700 and files 0600: answers are private. Of requests nothing is kept but digests, so no credential
//! of the agent can reach the disk; of the answers' headers, cookies are left out.
//!
//! # When is what durable?
//! The index is written, not synced: the line that opens a turn is in the kernel's hands before the turn's boundary is
//! given out, so turn numbers survive the death of the process. After a power failure the newest lines may be missing;
//! then the host raises the [floor](crate::Coordinator::set_floor) to the newest turn that its store knows. An answer
//! is synced once, at its end, and the end of the answer is given to the agent after that.

mod answer;
mod index;

use std::collections::HashMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use crab_core::{Error, ErrorKind, Result, SandboxId, TurnNumber, keep_house};
use tokio::task::JoinHandle;

pub(crate) use answer::{AnswerName, AnswerReader, AnswerWriter, Head};
pub(crate) use index::Event;

/// Files of the journal, whatever is in them.
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz_journal(data: &[u8]) {
    let (events, _) = index::parse(data);
    let text: Vec<u8> = events.iter().flat_map(Event::line).collect();
    assert_eq!(index::parse(&text), (events, 0));
    let found = Found { events: index::parse(data).0, answers: Vec::new() };
    let ledger = crate::turn::ledger::Ledger::load(&found);
    let again = Found { events: ledger.events(), answers: Vec::new() };
    assert_eq!(crate::turn::ledger::Ledger::load(&again).events(), ledger.events());
    answer::fuzz(data);
}

/// At most so many index files are kept open.
const OPEN_FILES: usize = 128;

/// How much a journal keeps.
#[derive(Clone, Copy, Debug)]
pub struct JournalLimits {
    /// The longest answer that is kept, in bytes. Longer ones go through, unjournaled. Default 64 MiB.
    pub answer_bytes: u64,
    /// The most bytes of answers for one sandbox; the oldest go first. Default 1 GiB.
    pub sandbox_bytes: u64,
    /// The most turns for one sandbox; the oldest go first. Default 4,096.
    pub turns: usize,
}

impl Default for JournalLimits {
    fn default() -> Self {
        Self { answer_bytes: 64 << 20, sandbox_bytes: 1 << 30, turns: 4096 }
    }
}

/// What a journal held when it was opened.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) events: Vec<Event>,
    /// Whole answers: turn, attempt, bytes on disk.
    pub(crate) answers: Vec<(TurnNumber, u32, u64)>,
}

type Then = Box<dyn FnOnce() + Send>;

enum Job {
    Append(SandboxId, Vec<u8>, Option<Then>),
    Remove(PathBuf),
    RemoveSandbox(SandboxId),
    Rewrite(SandboxId, Vec<u8>),
    Stop,
}

/// An open journal. Index lines are written by a thread of its own, in the order in which they were given.
#[derive(Debug)]
pub(crate) struct Journal {
    dir: PathBuf,
    pub(crate) limits: JournalLimits,
    remover: Remover,
    thread: Option<std::thread::JoinHandle<()>>,
    _lock: File,
}

/// Removes files in the background.
#[derive(Clone, Debug)]
pub(crate) struct Remover(mpsc::Sender<Job>);

impl Remover {
    fn remove<T: Send + 'static>(self, path: PathBuf, after: Option<JoinHandle<T>>) {
        match (after, tokio::runtime::Handle::try_current()) {
            // A write that is under way would make the file again.
            (Some(after), Ok(runtime)) => {
                runtime.spawn(async move {
                    let _ = after.await;
                    let _ = self.0.send(Job::Remove(path));
                });
            }
            _ => {
                let _ = self.0.send(Job::Remove(path));
            }
        }
    }
}

impl Journal {
    /// Opens or makes the journal in `dir` and reads what it holds. Blocks.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] where another coordinator has it open; errors of the file system.
    pub(crate) fn open(dir: &Path, limits: JournalLimits) -> Result<(Self, HashMap<SandboxId, Found>)> {
        make_dir(dir)?;
        let lock_path = dir.join("lock");
        let lock = private()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock_path)
            .map_err(|error| Error::io(format_args!("open {}", lock_path.display()), error))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!("the journal {} is in use by another coordinator", dir.display()),
                )
                .fix("stop the other one or give this one a journal of its own"));
            }
            Err(std::fs::TryLockError::Error(error)) => {
                return Err(Error::io(format_args!("lock {}", lock_path.display()), error));
            }
        }
        let found = read_all(dir)?;
        let (sender, jobs) = mpsc::channel();
        let thread_dir = dir.to_owned();
        let thread = std::thread::Builder::new()
            .name("crab-journal".into())
            .spawn(move || keep_house(|| run(&thread_dir, &jobs)))
            .map_err(|error| Error::io("start the journal's thread", error))?;
        let journal = Self { dir: dir.to_owned(), limits, remover: Remover(sender), thread: Some(thread), _lock: lock };
        Ok((journal, found))
    }

    /// Writes an event, then calls `then`, also where the write failed. Does not block.
    pub(crate) fn append(&self, sandbox: &SandboxId, event: &Event, then: Option<Then>) {
        let job = Job::Append(sandbox.clone(), event.line(), then);
        // The thread ends only when the journal is dropped.
        let _ = self.remover.0.send(job);
    }

    /// Puts these events in the place of all that the sandbox's index holds.
    pub(crate) fn rewrite(&self, sandbox: &SandboxId, events: &[Event]) {
        let text = events.iter().flat_map(Event::line).collect();
        let _ = self.remover.0.send(Job::Rewrite(sandbox.clone(), text));
    }

    /// Removes all that is kept of a sandbox.
    pub(crate) fn remove_sandbox(&self, sandbox: &SandboxId) {
        let _ = self.remover.0.send(Job::RemoveSandbox(sandbox.clone()));
    }

    /// Removes an answer.
    pub(crate) fn remove_answer(&self, sandbox: &SandboxId, turn: TurnNumber, attempt: u32) {
        let path = self.answer_path(sandbox, turn, attempt);
        let _ = self.remover.0.send(Job::Remove(path));
    }

    /// Where an answer is kept.
    pub(crate) fn answer_path(&self, sandbox: &SandboxId, turn: TurnNumber, attempt: u32) -> PathBuf {
        self.dir.join(sandbox.as_str()).join(format!("{:020}.{attempt:04}.answer", turn.0))
    }

    /// Begins to write an answer.
    pub(crate) fn begin(&self, name: &AnswerName, attempt: u32, head: &Head) -> Result<AnswerWriter> {
        AnswerWriter::begin(
            self.answer_path(&name.sandbox, name.turn, attempt),
            name,
            head,
            self.limits.answer_bytes,
            self.remover.clone(),
        )
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        // Writers that still live hold senders of their own, so the end of the channel cannot tell the thread to stop.
        // What was sent before is written first; the lock is given back after that.
        let _ = self.remover.0.send(Job::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Runs what writes to the journal on a thread that may block.
fn housework<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> tokio::task::JoinHandle<T> {
    tokio::task::spawn_blocking(move || keep_house(work))
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

fn make_dir(dir: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|error| Error::io(format_args!("make {}", dir.display()), error))
}

fn read_all(dir: &Path) -> Result<HashMap<SandboxId, Found>> {
    let io = |error| Error::io(format_args!("read {}", dir.display()), error);
    let mut all = HashMap::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        let entry = entry.map_err(io)?;
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let name = entry.file_name();
        let Some(sandbox) = name.to_str().and_then(|name| SandboxId::new(name).ok()) else {
            continue;
        };
        if is_dir {
            all.insert(sandbox, read_sandbox(&entry.path())?);
        }
    }
    Ok(all)
}

fn read_sandbox(dir: &Path) -> Result<Found> {
    let io = |error| Error::io(format_args!("read {}", dir.display()), error);
    let mut found = Found::default();
    match std::fs::read(dir.join("index")) {
        Ok(text) => {
            let (events, alien) = index::parse(&text);
            if alien > 0 {
                tracing::warn!(dir = %dir.display(), lines = alien, "stepped over torn or alien lines of the journal");
            }
            found.events = events;
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(io(error)),
    }
    for entry in std::fs::read_dir(dir).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let Some((turn, attempt)) = path.file_name().and_then(|name| parse_name(name.to_str()?)) else {
            continue;
        };
        match answer::seems_whole(&path) {
            Some(bytes) => found.answers.push((turn, attempt, bytes)),
            None => {
                // A part of an answer, left by a process that died.
                if let Err(error) = std::fs::remove_file(&path) {
                    tracing::warn!(path = %path.display(), %error, "cannot remove a part of an answer");
                }
            }
        }
    }
    found.answers.sort_unstable();
    Ok(found)
}

fn parse_name(name: &str) -> Option<(TurnNumber, u32)> {
    let (turn, attempt) = name.strip_suffix(".answer")?.split_once('.')?;
    Some((TurnNumber(turn.parse().ok()?), attempt.parse().ok()?))
}

/// The journal's thread.
fn run(dir: &Path, jobs: &mpsc::Receiver<Job>) {
    let mut open: HashMap<SandboxId, File> = HashMap::new();
    while let Ok(job) = jobs.recv() {
        let outcome = match job {
            Job::Append(sandbox, line, then) => {
                let outcome = append(dir, &mut open, &sandbox, &line);
                if let Some(then) = then {
                    then();
                }
                outcome
            }
            Job::Remove(path) => remove_file(&path),
            Job::Stop => return,
            Job::RemoveSandbox(sandbox) => {
                open.remove(&sandbox);
                let path = dir.join(sandbox.as_str());
                match std::fs::remove_dir_all(&path) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        Err(Error::io(format_args!("remove {}", path.display()), error))
                    }
                    _ => Ok(()),
                }
            }
            Job::Rewrite(sandbox, text) => {
                open.remove(&sandbox);
                rewrite(&dir.join(sandbox.as_str()), &text)
            }
        };
        if let Err(error) = outcome {
            metrics::counter!(crate::names::JOURNAL_ERRORS).increment(1);
            tracing::error!(%error, "the journal could not be written");
        }
    }
}

fn append(dir: &Path, open: &mut HashMap<SandboxId, File>, sandbox: &SandboxId, line: &[u8]) -> Result<()> {
    if !open.contains_key(sandbox) {
        if open.len() >= OPEN_FILES {
            open.clear();
        }
        let dir = dir.join(sandbox.as_str());
        make_dir(&dir)?;
        let path = dir.join("index");
        let io = |error| Error::io(format_args!("open {}", path.display()), error);
        let mut file = private().create(true).append(true).read(true).open(&path).map_err(io)?;
        // Whoever wrote here before may have died within a line.
        if !ends_with_line_feed(&mut file).map_err(io)? {
            file.write_all(b"\n").map_err(io)?;
        }
        open.insert(sandbox.clone(), file);
    }
    match open.get_mut(sandbox) {
        Some(file) => {
            file.write_all(line).map_err(|error| Error::io(format_args!("write the journal of {sandbox}"), error))
        }
        None => Ok(()),
    }
}

fn ends_with_line_feed(file: &mut File) -> std::io::Result<bool> {
    use std::io::{Read, Seek, SeekFrom};
    if file.seek(SeekFrom::End(0))? == 0 {
        return Ok(true);
    }
    file.seek(SeekFrom::End(-1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}

fn rewrite(dir: &Path, text: &[u8]) -> Result<()> {
    let (temporary, path) = (dir.join("index.new"), dir.join("index"));
    let io = |error| Error::io(format_args!("write {}", temporary.display()), error);
    make_dir(dir)?;
    let mut file = private().create(true).truncate(true).write(true).open(&temporary).map_err(io)?;
    file.write_all(text).map_err(io)?;
    file.sync_all().map_err(io)?;
    std::fs::rename(&temporary, &path).map_err(io)?;
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io)
}

fn remove_file(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format_args!("remove {}", path.display()), error))
        }
        _ => Ok(()),
    }
}
