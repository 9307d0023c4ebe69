//! Memory that is copied while the sandbox runs on, so that little of it is left for the freeze.
//!
//! 1. In a first, short freeze it is noted for every page of private memory which page of the machine it is, and the
//!    kernel forgets which pages were written.
//! 2. While the sandbox runs, the pages are copied. What is written meanwhile the kernel marks.
//! 3. In the freeze of the dump, CRIU is given the copies as the images of an earlier dump. It saves the pages that are
//!    marked, and takes the others to be in the copies.
//!
//! **The marks alone are not to be trusted.** A page table that `mremap` moves as a whole keeps its entries as they
//! are: what comes to lie where something else was copied bears no mark. So before CRIU looks, each page without a mark
//! is compared with what was noted: it must be the same page of the machine, and its copy must have been made while it
//! was. Any other page is given a mark, by writing a byte that it has. And since a process may have the marks taken
//! away itself, some pages are marked from the beginning on: where such a mark is gone, the copies of that process are
//! not used.
//!
//! Shared memory is saved in the dump, always. What is made of both is a whole dump: [`Precopy::unite`].

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crab_core::{Error, ErrorKind, Result};

use crate::deposit::Part;
use crate::files;
use crate::marks::{IN_MEMORY, Layout, PAGE_SIZE, frame, is_there, read_words, scan};
use crate::pack::PAGE;
use crate::pagemap::{self, Pagemap, Pages};
use crate::procfs::{self, Stat};
use crate::sys::{PAGE_LARGE, PAGE_OF_FILE, PAGE_OF_ZEROS, PAGE_WRITTEN};

/// So many pages are copied in one piece.
const CHUNK: usize = 256;
/// So many pages of a process are marked from the beginning on.
const SENTINELS: usize = 8;
/// The link to the copies that CRIU makes in the dump.
const LINK: &str = "parent";

/// Pages that lie one after another, in memory and in the file of copies.
#[derive(Debug)]
struct Span {
    address: u64,
    /// For each page which page of the machine it was, and 0 where there is no copy of it.
    frames: Vec<u64>,
    /// The first one's place in the file.
    place: u64,
}

impl Span {
    fn end(&self) -> u64 {
        self.address + self.frames.len() as u64 * PAGE_SIZE
    }
}

/// The copies of one process's pages.
#[derive(Debug)]
struct Process {
    pid: u32,
    /// Its number in the sandbox, by which CRIU names its images.
    inside: u32,
    started: u64,
    map: File,
    memory: File,
    vdso: Option<(u64, u64)>,
    /// By address.
    spans: Vec<Span>,
    /// The kernel's code for it.
    code: Option<Span>,
    /// Pages that are marked from the beginning on: where, and which of the machine.
    sentinels: Vec<(u64, u64)>,
    /// `pages-N.img`.
    copies: Arc<File>,
    number: u32,
}

impl Process {
    /// Notes its pages and has the kernel forget which were written. It is stopped. `None` where it is to be dumped
    /// without copies.
    fn note(pid: u32, directory: &Path, number: u32) -> io::Result<Option<Self>> {
        let (Some(stat), Some(inside)) = (Stat::read(pid), procfs::pid_inside(pid)) else { return Ok(None) };
        let layout = Layout::read(pid)?;
        if stat.is_dead() || layout.has_queue {
            return Ok(None);
        }
        let map = File::open(format!("/proc/{pid}/pagemap"))?;
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
        let (mut spans, mut place) = (Vec::new(), 0);
        for range in &layout.private {
            scan(&map, *range, PAGE_OF_FILE | PAGE_OF_ZEROS, |start, end| {
                let mut frames = vec![0; usize::try_from((end - start) / PAGE_SIZE).unwrap_or(0)];
                read_words(&map, start, &mut frames)?;
                frames.iter_mut().for_each(|word| *word = frame(*word));
                let count = frames.len() as u64;
                spans.push(Span { address: start, frames, place });
                place += count;
                Ok(())
            })?;
        }
        std::fs::write(format!("/proc/{pid}/clear_refs"), "4")?;
        let copies = Arc::new(files::create(&directory.join(format!("pages-{number}.img")))?);
        let vdso = layout.vdso;
        let code = vdso.map(|(start, end)| Span {
            address: start,
            frames: vec![IN_MEMORY; usize::try_from((end - start) / PAGE_SIZE).unwrap_or(0)],
            place,
        });
        let (started, sentinels) = (stat.started, Vec::new());
        let mut process = Self { pid, inside, started, map, memory, vdso, spans, code, sentinels, copies, number };
        if !process.copy_code()? {
            return Ok(None);
        }
        process.place_sentinels(&layout)?;
        Ok(Some(process))
    }

    /// The kernel's code is the same in all processes, until somebody writes into it; then a page of it is the process's
    /// own.
    fn copy_code(&self) -> io::Result<bool> {
        let Some(code) = &self.code else { return Ok(true) };
        if !self.is_pristine()? {
            return Ok(false);
        }
        let mut bytes = vec![0; code.frames.len() * PAGE];
        self.memory.read_exact_at(&mut bytes, code.address)?;
        self.copies.write_all_at(&bytes, code.place * PAGE_SIZE)?;
        Ok(true)
    }

    fn is_pristine(&self) -> io::Result<bool> {
        let mut own = false;
        if let Some(range) = self.vdso {
            scan(&self.map, range, PAGE_OF_FILE, |_, _| {
                own = true;
                Ok(())
            })?;
        }
        Ok(!own)
    }

    /// Not in large pages, of which the whole would be marked.
    fn place_sentinels(&mut self, layout: &Layout) -> io::Result<()> {
        let mut small = Vec::new();
        for range in &layout.private {
            scan(&self.map, *range, PAGE_OF_FILE | PAGE_OF_ZEROS | PAGE_LARGE, |start, end| {
                small.extend((start..end).step_by(PAGE));
                Ok(())
            })?;
        }
        for address in small.iter().copied().step_by((small.len() / SENTINELS).max(1)).take(SENTINELS) {
            self.mark(address)?;
            let mut words = [0];
            read_words(&self.map, address, &mut words)?;
            self.sentinels.push((address, frame(words[0])));
        }
        Ok(())
    }

    /// Marks a page as written, and leaves it as it is. The process is stopped.
    fn mark(&self, address: u64) -> io::Result<()> {
        let mut byte = [0];
        self.memory.read_exact_at(&mut byte, address)?;
        self.memory.write_all_at(&byte, address)
    }

    /// Copies the pages, while the process may run. A page that moves meanwhile is left out.
    fn copy(&mut self, wanted: &dyn Fn() -> Result<()>) -> Result<()> {
        let mut bytes = vec![0; CHUNK * PAGE];
        let mut words = vec![0; CHUNK];
        for span in &mut self.spans {
            for (n, frames) in span.frames.chunks_mut(CHUNK).enumerate() {
                wanted()?;
                let before = (n * CHUNK) as u64;
                let address = span.address + before * PAGE_SIZE;
                let (Some(bytes), Some(words)) = (bytes.get_mut(..frames.len() * PAGE), words.get_mut(..frames.len()))
                else {
                    continue;
                };
                let mut compare = |frames: &mut [u64]| {
                    read_words(&self.map, address, words)?;
                    for (noted, now) in frames.iter_mut().zip(words.iter()) {
                        if *noted != frame(*now) {
                            *noted = 0;
                        }
                    }
                    Ok::<(), io::Error>(())
                };
                // It must be the page that was noted before and after its copy is made.
                let copied = compare(frames)
                    .and_then(|()| self.memory.read_exact_at(bytes, address))
                    .and_then(|()| compare(frames));
                if copied.is_err() {
                    // The process has ended, or some of it cannot be read.
                    frames.fill(0);
                    continue;
                }
                let place = (span.place + before) * PAGE_SIZE;
                self.copies.write_all_at(bytes, place).map_err(|e| Error::io("copy memory", e))?;
            }
        }
        Ok(())
    }

    /// The list of the pages of which there are copies.
    fn pagemap(&self) -> Pagemap {
        let mut pages: Vec<Pages> = Vec::new();
        for span in self.spans.iter().chain(&self.code) {
            for (frame, address) in span.frames.iter().zip((span.address..).step_by(PAGE)) {
                match pages.last_mut() {
                    _ if *frame == 0 => {}
                    Some(last) if last.address + last.count * PAGE_SIZE == address => last.count += 1,
                    _ => pages.push(Pages::present(address, 1)),
                }
            }
        }
        pages.sort_unstable_by_key(|pages| pages.address);
        Pagemap { pages_id: self.number, pages }
    }

    /// Sees to it that no page without a mark differs from its copy. The process is stopped. Says whether the copies
    /// may be used.
    fn check(&self) -> io::Result<bool> {
        let is_same = Stat::read(self.pid).is_some_and(|stat| !stat.is_dead() && stat.started == self.started);
        let layout = Layout::read(self.pid)?;
        if !is_same || layout.has_queue || layout.vdso != self.vdso || !self.is_pristine()? {
            return Ok(false);
        }
        let mut kept = 0;
        for (address, noted) in &self.sentinels {
            let mut words = [0];
            read_words(&self.map, *address, &mut words)?;
            // Where another page has come in its place, it tells nothing.
            if frame(words[0]) == *noted {
                if is_there(&self.map, *address, PAGE_WRITTEN)? {
                    return Ok(false);
                }
                kept += 1;
            }
        }
        if kept == 0 {
            return Ok(false);
        }
        for range in layout.private {
            scan(&self.map, range, PAGE_OF_FILE | PAGE_OF_ZEROS | PAGE_WRITTEN, |start, end| {
                let mut words = vec![0; usize::try_from((end - start) / PAGE_SIZE).unwrap_or(0)];
                read_words(&self.map, start, &mut words)?;
                let mut at = self.spans.partition_point(|span| span.end() <= start);
                for (word, address) in words.iter().zip((start..).step_by(PAGE)) {
                    if self.spans.get(at).is_some_and(|span| span.end() <= address) {
                        at += 1;
                    }
                    let noted = self.spans.get(at).and_then(|span| frame_at(span, address)).unwrap_or(0);
                    if noted == 0 || noted != frame(*word) {
                        self.mark(address)?;
                    }
                }
                Ok(())
            })?;
        }
        Ok(true)
    }

    /// Where the copies of pages are that CRIU took to be there.
    fn find(&self, pages: &Pages) -> Option<Vec<Part>> {
        let end = pages.address.checked_add(pages.count.checked_mul(PAGE_SIZE)?)?;
        let (mut address, mut parts) = (pages.address, Vec::new());
        while address < end {
            let at = self.spans.partition_point(|span| span.end() <= address);
            let mut near = self.spans.get(at).into_iter().chain(&self.code);
            let span = near.find(|span| (span.address..span.end()).contains(&address))?;
            let stop = end.min(span.end());
            if (address..stop).step_by(PAGE).any(|address| frame_at(span, address).unwrap_or(0) == 0) {
                return None;
            }
            let first = span.place + (address - span.address) / PAGE_SIZE;
            parts.push(Part { file: Arc::clone(&self.copies), first, count: (stop - address) / PAGE_SIZE });
            address = stop;
        }
        Some(parts)
    }
}

fn frame_at(span: &Span, address: u64) -> Option<u64> {
    let at = usize::try_from(address.checked_sub(span.address)? / PAGE_SIZE).ok()?;
    span.frames.get(at).copied()
}

/// The copies of a sandbox's memory.
#[derive(Debug)]
pub(crate) struct Precopy {
    directory: PathBuf,
    processes: Vec<Process>,
}

impl Precopy {
    /// Notes the pages of stopped processes. The copies will be in a directory of their own.
    pub(crate) fn note(pids: impl IntoIterator<Item = u32>, directory: &Path) -> Result<Self> {
        files::private_directory(directory)?;
        let failed = |e| Error::io("note the sandbox's pages", e);
        let mut processes = Vec::new();
        for (pid, number) in pids.into_iter().zip(1..) {
            match Process::note(pid, directory, number) {
                Ok(process) => processes.extend(process),
                Err(error) => tracing::debug!(pid, %error, "its memory is not copied beforehand"),
            }
        }
        let made = uptime().map_err(failed)?;
        let path = directory.join("inventory.img");
        let write = || io::Write::write_all(&mut files::create(&path)?, &pagemap::inventory(made));
        write().map_err(failed)?;
        Ok(Self { directory: directory.to_owned(), processes })
    }

    /// Copies them, while the processes run. `wanted` is asked now and then whether to go on.
    pub(crate) fn copy(&mut self, wanted: &dyn Fn() -> Result<()>) -> Result<()> {
        for process in &mut self.processes {
            process.copy(wanted)?;
            let path = self.directory.join(list(process.inside));
            let write = || io::Write::write_all(&mut files::create(&path)?, &process.pagemap().encode());
            write().map_err(|e| Error::io("list the copies of memory", e))?;
        }
        Ok(())
    }

    /// Sees to it that CRIU takes no copy that is not as its page. The processes are stopped, and CRIU has not looked yet.
    pub(crate) fn check(&self) -> Result<()> {
        for process in &self.processes {
            let holds = process.check().unwrap_or_else(|error| {
                tracing::debug!(pid = process.pid, %error, "its pages cannot be compared with their copies");
                false
            });
            if !holds {
                let path = self.directory.join(list(process.inside));
                std::fs::remove_file(path).map_err(|e| Error::io("give up copies of memory", e))?;
            }
        }
        Ok(())
    }

    /// Makes the dump in `images` a whole one: its lists of pages name no copies any more. What the files of pages are
    /// made of now is what this returns, by name.
    pub(crate) fn unite(&self, images: &Path) -> Result<HashMap<String, Vec<Part>>> {
        let failed = |e| Error::io("make the dump whole", e);
        let broken = |what: &str| Error::new(ErrorKind::Internal, format!("an incremental dump {what}"));
        match std::fs::remove_file(images.join(LINK)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let known: BTreeMap<String, &Process> = self.processes.iter().map(|p| (list(p.inside), p)).collect();
        let mut united = HashMap::new();
        for name in files::names(images)?.into_iter().filter(|name| name.starts_with("pagemap-")) {
            let path = images.join(&name);
            let list = Pagemap::parse(&std::fs::read(&path).map_err(failed)?);
            let list = list.ok_or_else(|| broken(&format!("has a list of pages {name} that cannot be read")))?;
            if !list.pages.iter().any(|pages| pages.in_parent) {
                continue;
            }
            let process = known.get(&name).ok_or_else(|| broken("refers to copies of what was not copied"))?;
            let pages = format!("pages-{}.img", list.pages_id);
            let own = Arc::new(File::open(images.join(&pages)).map_err(failed)?);
            let (mut parts, mut next) = (Vec::new(), 0);
            for run in &list.pages {
                if run.in_parent {
                    parts.extend(process.find(run).ok_or_else(|| broken("refers to pages that were not copied"))?);
                } else {
                    parts.push(Part { file: Arc::clone(&own), first: next, count: run.count });
                    next += run.count;
                }
            }
            if own.metadata().map_err(failed)?.len() != next * PAGE_SIZE {
                return Err(broken("has pages that its list does not name"));
            }
            std::fs::write(&path, list.encode()).map_err(failed)?;
            united.insert(pages, parts);
        }
        Ok(united)
    }
}

/// CRIU's name for the list of a process's pages.
fn list(inside: u32) -> String {
    format!("pagemap-{inside}.img")
}

/// Microseconds since the host started, as CRIU counts them.
fn uptime() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/uptime")?;
    let seconds = text.split_once(' ').and_then(|(up, _)| {
        let (whole, part) = up.split_once('.')?;
        Some(whole.parse::<u64>().ok()? * 1_000_000 + part.parse::<u64>().ok()? * 10_000)
    });
    seconds.ok_or_else(|| io::Error::other("/proc/uptime cannot be read"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that maps memory, and does what it is told with it, line by line.
    const SUBJECT: &str = r"
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
P, Z, I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
libc.mmap.restype = libc.mremap.restype = P
libc.mmap.argtypes = [P, Z, I, I, I, ctypes.c_long]
libc.mremap.argtypes = [P, Z, Z, I, P]
libc.madvise.argtypes = [P, Z, I]
libc.munmap.argtypes = [P, Z]
MB = 1 << 20
BASE = 0x200000000000
def fresh(n, small=True):
    assert libc.mmap(BASE + n * 16 * MB, 4 * MB, 3, 2 | 16 | 32, -1, 0)
    libc.madvise(BASE + n * 16 * MB, 4 * MB, 15 if small else 14)
def fill(n, value, start=0, size=4 * MB):
    ctypes.memset(BASE + n * 16 * MB + start, value, size)
def move(a, b):
    assert libc.mremap(BASE + a * 16 * MB, 4 * MB, 4 * MB, 3, BASE + b * 16 * MB) == BASE + b * 16 * MB
for n in range(8):
    fresh(n, n < 4)
    fill(n, n + 1)
print('ready', flush=True)
for line in sys.stdin:
    exec(line)
    print('done', flush=True)
";

    struct Subject {
        child: std::process::Child,
        lines: io::Lines<io::BufReader<std::process::ChildStdout>>,
        directory: tempfile::TempDir,
    }

    impl Drop for Subject {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    impl Subject {
        fn start() -> Option<Self> {
            if !crate::marks::is_possible().unwrap_or(false) {
                println!(
                    "skipped: copies of memory before a dump (this kernel does not mark the pages that are written)"
                );
                return None;
            }
            let mut child = std::process::Command::new("python3")
                .args(["-c", SUBJECT])
                .stdin(std::process::Stdio::piped())
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            let lines = io::BufRead::lines(io::BufReader::new(child.stdout.take().unwrap()));
            let mut subject = Self { child, lines, directory: tempfile::tempdir().unwrap() };
            assert_eq!(subject.lines.next().unwrap().unwrap(), "ready");
            Some(subject)
        }
        fn tell(&mut self, line: &str) {
            use std::io::Write;
            writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
            assert_eq!(self.lines.next().unwrap().unwrap(), "done", "{line}");
        }
        /// Stops or continues it. It waits for its next line, so it is where it stays.
        fn signal(&self, signal: rustix::process::Signal) {
            let pid = rustix::process::Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
            rustix::process::kill_process(pid, signal).unwrap();
            let wanted = signal == rustix::process::Signal::STOP;
            while (Stat::read(self.child.id()).unwrap().state == 'T') != wanted {
                std::thread::yield_now();
            }
        }
        fn note(&self) -> Precopy {
            self.signal(rustix::process::Signal::STOP);
            let precopy = Precopy::note([self.child.id()], &self.directory.path().join("before")).unwrap();
            self.signal(rustix::process::Signal::CONT);
            assert_eq!(precopy.processes.len(), 1);
            precopy
        }
    }

    /// Of the pages without a mark, how many are not as their copies are, and how many are.
    fn differing(process: &Process) -> (usize, usize) {
        let (mut wrong, mut right) = (0, 0);
        for range in Layout::read(process.pid).unwrap().private {
            scan(&process.map, range, PAGE_OF_FILE | PAGE_OF_ZEROS | PAGE_WRITTEN, |start, end| {
                for address in (start..end).step_by(PAGE) {
                    let (mut now, mut then) = (vec![0; PAGE], vec![0; PAGE]);
                    process.memory.read_exact_at(&mut now, address)?;
                    let is_right = process.find(&Pages::present(address, 1)).is_some_and(|parts| {
                        parts[0].file.read_exact_at(&mut then, parts[0].first * PAGE_SIZE).is_ok() && now == then
                    });
                    *(if is_right { &mut right } else { &mut wrong }) += 1;
                }
                Ok(())
            })
            .unwrap();
        }
        (wrong, right)
    }

    #[test]
    fn no_unmarked_page_differs_from_its_copy_whatever_happened_to_the_memory() {
        let changes = [
            "pass",
            "fill(0, 77)",
            "fill(4, 77, 3 * MB, 1)",
            "libc.munmap(BASE, 4 * MB); fresh(0); fill(0, 9, 0, MB)",
            "libc.madvise(BASE, 4 * MB, 4)",
            "libc.madvise(BASE, 4 * MB, 4); ctypes.string_at(BASE, 4 * MB)",
            // Page tables as a whole, large pages, and one by one.
            "move(0, 1)",
            "move(4, 5)",
            "move(0, 20); move(1, 0); move(20, 1)",
            "libc.mremap(BASE, MB, MB, 3, BASE + 16 * MB)",
            "libc.mremap(BASE + 4096, MB, MB, 3, BASE + 16 * MB)",
            // What moves away and comes back is as it was.
            "move(0, 20); fill(20, 5, MB, MB); move(20, 0)",
            "pid = os.fork()\nif pid == 0: fill(0, 3); os._exit(0)\nos.waitpid(pid, 0); fill(0, 4, 0, MB)",
            "open('/proc/self/mem', 'r+b', 0).seek(BASE) and None; f = open('/proc/self/mem', 'r+b', 0); f.seek(BASE); f.write(b'x' * MB)",
        ];
        for change in changes {
            for during_the_copy in [false, true] {
                let Some(mut subject) = Subject::start() else { return };
                let mut precopy = subject.note();
                let told = format!("exec({change:?})");
                if during_the_copy {
                    // Whatever the copy meets.
                    std::thread::scope(|scope| {
                        scope.spawn(|| precopy.copy(&|| Ok(())).unwrap());
                        subject.tell(&told);
                    });
                } else {
                    precopy.copy(&|| Ok(())).unwrap();
                    subject.tell(&told);
                }
                subject.signal(rustix::process::Signal::STOP);
                let process = &precopy.processes[0];
                let unchecked = differing(process).0;
                assert!(process.check().unwrap(), "{change}");
                let (wrong, right) = differing(process);
                println!("{change}: {unchecked} pages bore no mark and differed, {right} are taken from the copies");
                assert_eq!(wrong, 0, "{change}");
                assert!(right > 2048, "{change}: {right}");
            }
        }
    }

    #[test]
    fn copies_are_given_up_where_the_process_takes_the_marks_away_itself() {
        let Some(mut subject) = Subject::start() else { return };
        let mut precopy = subject.note();
        precopy.copy(&|| Ok(())).unwrap();
        let list = subject.directory.path().join("before").join(list(precopy.processes[0].inside));
        assert!(list.exists());
        subject.tell("fill(0, 99); open('/proc/self/clear_refs', 'w').write('4')");
        subject.signal(rustix::process::Signal::STOP);
        assert!(differing(&precopy.processes[0]).0 > 0);
        precopy.check().unwrap();
        assert!(!list.exists());
    }

    #[test]
    fn copies_of_another_process_are_given_up() {
        let Some(mut subject) = Subject::start() else { return };
        let mut precopy = subject.note();
        precopy.copy(&|| Ok(())).unwrap();
        assert!(precopy.processes[0].check().unwrap());
        // Its number may come again, its time not.
        precopy.processes[0].started += 1;
        assert!(!precopy.processes[0].check().unwrap());
        precopy.processes[0].started -= 1;
        let list = subject.directory.path().join("before").join(list(precopy.processes[0].inside));
        assert!(list.exists());
        let program = "os.execv('/usr/bin/python3', ['python3', '-c', 'print(\"done\", flush=True); input()'])";
        subject.tell(program);
        subject.signal(rustix::process::Signal::STOP);
        precopy.check().unwrap();
        assert!(!list.exists());
    }
}
