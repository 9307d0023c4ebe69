//! One restore: CRIU inside the sandbox's cgroup, and a tree that is checked before it runs.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crab_core::{Artifact, Condition, Error, ErrorKind, External, RestoreTarget, Result};
use rustix::process::{Pid, WaitId, WaitIdOptions};

use crate::ahead::Ahead;
use crate::backend::{Connections, Inner};
use crate::cgroup::Cgroup;
use crate::dump::{FACT_ARCHITECTURE, FACT_CRIU, FACT_KERNEL, FACT_TASKS, utf8};
use crate::externals::{self, Given};
use crate::failure::CriuFailure;
use crate::oci::Run;
use crate::procfs::{self, Stat};
use crate::program::{self, common_options};
use crate::proto::{Kind, Options, Response};
use crate::rebuild::is_memory;
use crate::store::{Body, Opened};
use crate::swrk::{Broken, Swrk};
use crate::sys::Surroundings;
use crate::turns::{Caller, Turn};
use crate::{files, preflight, serve, sockets};

const LOG: &str = "restore.log";

/// A restored tree. Dropping it ends the tree, unless it was handed on.
#[derive(Debug)]
pub(crate) struct RestoredTree {
    place: Option<Place>,
    init: u32,
    /// Held until the caller has the tree, or it is gone.
    _turn: Turn,
}

impl RestoredTree {
    /// Hands the tree on to the caller.
    pub(crate) fn hand_on(mut self) -> u32 {
        self.place = None;
        self.init
    }
}

impl Drop for RestoredTree {
    fn drop(&mut self) {
        // Nobody waits for it any more.
        if let Some(place) = self.place.take()
            && let Err(error) = place.clear()
        {
            tracing::error!(%error, "a restored tree that nobody takes could not be ended");
        }
    }
}

/// The sandbox's cgroup, by both names.
#[derive(Clone, Debug)]
struct Place {
    cgroup: Cgroup,
    /// As `/proc/PID/cgroup` names it, once something is in it.
    line: Option<String>,
}

impl Place {
    /// Ends all that is in it, and waits for what is our child.
    fn clear(&self) -> Result<()> {
        self.cgroup.kill().map_err(|e| e.while_doing("end what was restored").condition(Condition::Unknown))?;
        let Some(line) = &self.line else { return Ok(()) };
        for child in procfs::children(std::process::id()) {
            if procfs::cgroup(child).as_ref() == Some(line)
                && let Some(pid) = i32::try_from(child).ok().and_then(Pid::from_raw)
            {
                // It was killed, so this does not wait for long; it fails where somebody else was quicker.
                let _ = rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED);
            }
        }
        Ok(())
    }
}

/// Restores. Where it fails, nothing of the tree is left.
pub(crate) fn run(
    inner: &Arc<Inner>,
    artifact: &Artifact,
    target: RestoreTarget,
    caller: &Caller,
) -> Result<RestoredTree> {
    let RestoreTarget { sandbox, inherited, deadline, .. } = target;
    let turn = inner.turns.take(&sandbox.cgroup, deadline)?;
    let cgroup = Cgroup::at(&sandbox.cgroup);
    if cgroup.is_populated()? {
        return Err(Error::new(ErrorKind::Busy, format!("the sandbox {} has tasks", sandbox.id)).fix("kill it first"));
    }
    let stopped = |error: Error| error.condition(Condition::Stopped);
    let Opened { body, whole } = inner.store.open_whole(artifact).map_err(stopped)?;
    suits(&body.facts, inner.program.version).map_err(stopped)?;
    if !sandbox.root.is_dir() {
        let what = format!("the root {} of the sandbox {} is no directory", sandbox.root.display(), sandbox.id);
        return Err(stopped(Error::new(ErrorKind::InvalidInput, what).fix("restore its filesystem first")));
    }
    let Given { mut keep, inherit: inherit_fd, external } =
        externals::given(&body.external, inherited).map_err(stopped)?;
    let bind = CString::new(sandbox.root.as_os_str().as_bytes())
        .map_err(|_| stopped(Error::new(ErrorKind::InvalidInput, "the root's path holds a zero byte")))?;
    // Our own CRIU reads the memory from us. A runtime's could not, and many tasks at once would be slow.
    let served = Ahead::suits(&whole) && inner.serves();
    let first = |name: &str| !served || !is_memory(name);
    let area = inner.area_for(whole.size(first));
    let scratch = area.directory().map_err(stopped)?;
    let wanted = || in_time(deadline).and_then(|()| still_wanted(caller));
    let directory = scratch.images();
    whole.rebuild(&directory, first, &wanted).map_err(stopped)?;
    let memory = Ahead::new(&whole, &wanted);
    let open = |path| files::open_directory(path).map_err(|e| stopped(Error::io("open the work directory", e)));
    let (images, work) = (open(&directory)?, open(&scratch.work())?);
    let options = Options {
        root: Some(utf8(&sandbox.root, "the root's path").map_err(stopped)?),
        rst_sibling: Some(true),
        notify_scripts: Some(true),
        tcp_established: Some(inner.connections == Connections::Keep),
        tcp_close: Some(inner.connections == Connections::Close),
        inherit_fd,
        external,
        // Each page leaves the image as it goes into a task, so that no second copy of the memory is there.
        auto_dedup: Some(!served),
        ..common_options(images.as_raw_fd(), work.as_raw_fd(), LOG)
    };
    // CRIU wants the root to be a mount of its own.
    let mut binds = vec![(bind.clone(), bind)];
    binds.extend(area.run_directory().map_err(stopped)?);
    clear_addresses(&body, &keep);
    keep.push(scratch.tie().map_err(stopped)?);
    // A cgroup whose tasks were killed while frozen is still frozen, and CRIU would be when it goes in.
    cgroup.thaw().map_err(stopped)?;
    let entrance = Some(cgroup.entrance().map_err(stopped)?);

    let what = format!("restore the processes of the sandbox {} from {}", sandbox.id, artifact.id);
    still_wanted(caller).map_err(stopped)?;
    let mut place = Place { cgroup, line: None };
    let failed = |place: &Place, error: Error| {
        let cleared = place.clear();
        if let Some(oci) = &inner.oci {
            oci.forget(&sandbox.id);
        }
        match cleared {
            Ok(()) => error.condition(Condition::Stopped),
            Err(worse) => worse.caused_by(error),
        }
    };
    let conversed = std::thread::scope(|scope| {
        let serving = served.then(|| serve::start(scope, &memory, &directory)).transpose()?;
        let mut options = options;
        if let Some(serving) = &serving {
            options.images_dir_fd = serving.images.as_raw_fd();
        }
        let run = match &inner.oci {
            Some(oci) => Run::Runtime(oci.restore(&sandbox, &scratch, &options, deadline)?),
            None => {
                let surroundings = Surroundings { keep, cgroup: entrance, binds, session: false };
                Run::Own(Swrk::start(&inner.program.path, surroundings, deadline)?)
            }
        };
        if let Run::Own(swrk) = &run {
            place.line = procfs::cgroup(swrk.pid());
        }
        let mut talk = Talk { run, place: &place, body: &body, caller, init: None, refusal: None };
        let answer = talk.converse(options);
        let Talk { run, refusal, .. } = talk;
        Ok::<_, Error>((answer, run, refusal))
    });
    let (answer, run, refusal) = match conversed {
        Ok(conversed) => conversed,
        Err(error) => return Err(failed(&place, error.while_doing(&what))),
    };
    let ended_well = match &answer {
        Ok(_) => run.finish().is_ok_and(|status| status.success()),
        Err(_) => {
            drop(run);
            false
        }
    };
    let outcome = match (answer, refusal.or(memory.end())) {
        (_, Some(refusal)) => Err(refusal.while_doing(&what)),
        (Err(broken), None) => Err(broken.into_error(&what)),
        (Ok(answer), None) if answer.success && ended_well => {
            let init = answer.restore.and_then(|restored| u32::try_from(restored.pid).ok()).unwrap_or(0);
            is_in_place(init, &place.cgroup, inner.oci.is_none()).map(|()| init)
        }
        (Ok(_), None) => {
            let log = scratch.work().join(LOG);
            let text = std::fs::read(&log).unwrap_or_default();
            let kept = inner.store.keep_log(&format!("{}-{}-restore.log", sandbox.id, artifact.id), &log);
            let failure = CriuFailure::from_log(&String::from_utf8_lossy(&text)).kept_at(kept);
            Err(failure.into_error(&format!("cannot {what}{}", other_surroundings(&body, inner)), ErrorKind::Io))
        }
    };
    match outcome {
        Ok(init) => Ok(RestoredTree { place: Some(place), init, _turn: turn }),
        Err(error) => Err(failed(&place, error)),
    }
}

fn in_time(deadline: Option<Instant>) -> Result<()> {
    if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
        return Err(Error::new(ErrorKind::TimedOut, "the images were not put together by the deadline"));
    }
    Ok(())
}

/// A tree that nobody waits for is not built to its end.
fn still_wanted(caller: &Caller) -> Result<()> {
    if caller.has_gone() {
        return Err(Error::new(ErrorKind::Cancelled, "nobody waits for the restore any more"));
    }
    Ok(())
}

/// Ends what the killed processes' connections left in the network namespace that the host gives.
fn clear_addresses(body: &Body, keep: &[OwnedFd]) {
    // They stand in the order of what is external.
    let given = body.external.iter().zip(keep);
    let network = given.filter(|(external, _)| matches!(external, External::NetworkNamespace { .. }));
    for (_, namespace) in network {
        if let Err(error) = sockets::clear_lingering(namespace) {
            tracing::warn!(%error, "old connections may hold addresses that the restore needs");
        }
    }
}

/// Whether this host can bring back what was saved with these facts.
pub(crate) fn suits(facts: &BTreeMap<String, String>, here: program::Version) -> Result<()> {
    match facts.get(FACT_ARCHITECTURE).map(String::as_str) {
        Some(std::env::consts::ARCH) => {}
        other => {
            let made = other.unwrap_or("an unknown architecture");
            let what = format!("the artifact was made on {made}, and this host is {}", std::env::consts::ARCH);
            return Err(
                Error::new(ErrorKind::Unsupported, what).fix("restore it on a host like the one it was made on")
            );
        }
    }
    // CRIU reads what older ones wrote, and not the other way round.
    match facts.get(FACT_CRIU).and_then(|version| version.parse::<program::Version>().ok()) {
        Some(made) if made.release() > here.release() => {
            let what = format!("the artifact was made by CRIU {made}, and this host has {here}");
            Err(Error::new(ErrorKind::Unsupported, what).fix(format!("install CRIU {made} or newer")))
        }
        _ => Ok(()),
    }
}

/// What is not as it was at the dump: often no reason for a failure, but worth knowing then.
fn other_surroundings(body: &Body, inner: &Inner) -> String {
    let now = [(FACT_KERNEL, program::kernel_release()), (FACT_CRIU, inner.program.version.to_string())];
    let differs = now.into_iter().filter_map(|(fact, now)| {
        let then = body.facts.get(fact)?;
        (*then != now).then(|| format!("{fact} {then} then, {now} now"))
    });
    let text: Vec<_> = differs.collect();
    if text.is_empty() { String::new() } else { format!(" ({})", text.join(", ")) }
}

/// The tree after CRIU has gone.
fn is_in_place(init: u32, cgroup: &Cgroup, ours: bool) -> Result<()> {
    let broken =
        |what: &str| Err(Error::new(ErrorKind::Internal, format!("the restored init, process {init}, {what}")));
    match Stat::read(init) {
        Some(stat) if stat.is_dead() => broken("ended at once"),
        None => broken("does not live"),
        Some(stat) if ours && stat.parent != std::process::id() => broken("is not a child of this process"),
        Some(_) => preflight::membership(cgroup, init).map(drop),
    }
}

/// The tasks are whole and have not run yet: connections to the outside end here, before anybody reads from them.
fn reset_strays(init: u32) {
    let held = procfs::tree(init)
        .into_iter()
        .flat_map(procfs::descriptors)
        .filter_map(|descriptor| procfs::link_inode(&descriptor.target, "socket"))
        .collect();
    let reset = std::fs::File::open(format!("/proc/{init}/ns/net"))
        .and_then(|namespace| sockets::reset_strays(namespace, &held));
    if let Err(error) = reset {
        tracing::warn!(%error, "restored connections to the outside were not reset, and may hang");
    }
}

/// The conversation of one restore.
struct Talk<'a> {
    run: Run,
    place: &'a Place,
    body: &'a Body,
    caller: &'a Caller,
    init: Option<u32>,
    /// Why we broke the restore off.
    refusal: Option<Error>,
}

impl Talk<'_> {
    fn converse(&mut self, options: Options) -> Result<Response, Broken> {
        self.run.ask(Kind::Restore, options)?;
        loop {
            let message = self.run.hear()?;
            if message.kind() != Kind::Notify {
                return Ok(message);
            }
            let notify = message.notify.unwrap_or_default();
            let init = notify.pid.and_then(|pid| u32::try_from(pid).ok());
            self.init = init.or(self.init);
            let done = still_wanted(self.caller).and_then(|()| match (notify.script.as_deref(), self.init) {
                (Some("post-restore"), Some(init)) => self.is_complete(init),
                (Some("pre-resume"), Some(init)) => {
                    reset_strays(init);
                    Ok(())
                }
                _ => Ok(()),
            });
            let success = done.is_ok();
            if let Err(refusal) = done {
                self.refusal = Some(refusal);
            }
            self.run.answer(success)?;
        }
    }

    /// All tasks are there and none has run: there must be as many as at the dump, all in the sandbox's cgroup.
    fn is_complete(&self, init: u32) -> Result<()> {
        let Some(wanted) = self.body.facts.get(FACT_TASKS).and_then(|tasks| tasks.parse::<usize>().ok()) else {
            return Err(Error::new(ErrorKind::Corrupt, "the artifact does not say how many processes it holds"));
        };
        // Processes that CRIU needed for building the tree may still be ending.
        let patience = Instant::now() + Duration::from_secs(1);
        loop {
            let tree: std::collections::BTreeSet<u32> = procfs::tree(init)
                .into_iter()
                .filter(|pid| Stat::read(*pid).is_some_and(|stat| !stat.is_dead()))
                .collect();
            let members = self.place.cgroup.processes()?;
            if tree.len() == wanted && tree.is_subset(&members) {
                return Ok(());
            }
            if Instant::now() >= patience {
                let found = format!("{} processes, {} of them", tree.len(), tree.intersection(&members).count());
                let what = format!("restored were {found} in the sandbox's cgroup, and {wanted} were saved");
                return Err(Error::new(ErrorKind::Internal, what));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_newer_criu_or_another_machine_made_is_refused_before_anything_is_touched() {
        let facts = |architecture: &str, criu: &str| {
            let facts = [(FACT_ARCHITECTURE, architecture), (FACT_CRIU, criu)];
            facts.into_iter().map(|(fact, value)| (fact.to_owned(), value.to_owned())).collect::<BTreeMap<_, _>>()
        };
        let here: program::Version = "4.2.1".parse().unwrap();
        for fine in ["3.17", "4.2", "4.2.7", "what nobody knows"] {
            suits(&facts(std::env::consts::ARCH, fine), here).unwrap();
        }
        for newer in ["4.3", "5.0.1"] {
            let error = suits(&facts(std::env::consts::ARCH, newer), here).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(newer), "{error}");
        }
        assert_eq!(suits(&facts("vax", "4.2"), here).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(suits(&BTreeMap::new(), here).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
