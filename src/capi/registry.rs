//! Which sessions, keys, tokens and pairs there are in this process.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::failure::{ERROR, Failure, MEMORY, STUCK, TIMEOUT};
use super::handle::{Handle, destroyed};
use crate::oob::Role;

/// The number of the first session. Numbers are no addresses (these are not canonical, so that following one fails at
/// once), and are never used again.
const FIRST: u64 = 0x0CA7_0000_0000_0010;
/// From one number to the next.
const STEP: u64 = 0x10;

/// Sessions by number, and numbers by key for each role.
struct Sessions {
    made: u64,
    by_number: BTreeMap<u64, Arc<Handle>>,
    by_key: [BTreeMap<String, u64>; 2],
}

static SESSIONS: RwLock<Sessions> =
    RwLock::new(Sessions { made: 0, by_number: BTreeMap::new(), by_key: [BTreeMap::new(), BTreeMap::new()] });

/// Reads a role of C's.
pub(super) fn role(number: i32) -> Result<Role, Failure> {
    match number {
        0 => Ok(Role::Controller),
        1 => Ok(Role::Coprocessor),
        other => Err(Failure::new(format!("role {other} does not exist: 0 is the controller, 1 the coprocessor"))),
    }
}

fn place(role: Role) -> usize {
    match role {
        Role::Controller => 0,
        Role::Coprocessor => 1,
    }
}

/// Adds a session. With a key that is in use the newer one is found by it: a program that failed has left its sessions, and
/// its next run has to find its own.
pub(super) fn insert(handle: Handle) -> u64 {
    let mut sessions = SESSIONS.write().unwrap_or_else(PoisonError::into_inner);
    let number = FIRST + sessions.made * STEP;
    sessions.made += 1;
    if !handle.key.is_empty() {
        sessions.by_key[place(handle.role)].insert(handle.key.clone(), number);
        if handle.role == Role::Coprocessor {
            // A coprocessor that an earlier run left waiting is not this one's controller's.
            pairs().forget(&handle.key);
        }
    }
    sessions.by_number.insert(number, Arc::new(handle));
    number
}

/// The session with this number.
pub(super) fn find(number: u64) -> Result<Arc<Handle>, Failure> {
    let sessions = SESSIONS.read().unwrap_or_else(PoisonError::into_inner);
    sessions.by_number.get(&number).cloned().ok_or_else(|| unknown(number))
}

/// The number of the session with this role and key.
pub(super) fn find_key(role: Role, key: &str) -> Result<u64, Failure> {
    let sessions = SESSIONS.read().unwrap_or_else(PoisonError::into_inner);
    sessions.by_key[place(role)].get(key).copied().ok_or_else(|| {
        Failure::new(format!(
            "there is no {role} with the key '{key}': create it with this key first; a key ends with its session's destroy"
        ))
    })
}

/// Takes a session out; whoever still uses it keeps it.
pub(super) fn remove(number: u64) -> Result<Arc<Handle>, Failure> {
    let mut sessions = SESSIONS.write().unwrap_or_else(PoisonError::into_inner);
    let handle = sessions.by_number.remove(&number).ok_or_else(|| unknown(number))?;
    let keys = &mut sessions.by_key[place(handle.role)];
    if keys.get(&handle.key) == Some(&number) {
        keys.remove(&handle.key);
    }
    Ok(handle)
}

fn unknown(number: u64) -> Failure {
    Failure::new(match number {
        0 => "the session is NULL: its create failed, or get_session found none".into(),
        _ => format!("{number:#x} is no session: it has been destroyed, or create never gave it"),
    })
}

/// The ports of coprocessors that wait for the controller with their key, for the backend memcpy.
pub(super) struct Pairs(Mutex<BTreeMap<String, (usize, u16)>>);

static PAIRS: Pairs = Pairs(Mutex::new(BTreeMap::new()));

/// The coprocessors that wait for the controller with their key.
pub(super) fn pairs() -> &'static Pairs {
    &PAIRS
}

impl Pairs {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, (usize, u16)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `owner` waits at this port.
    pub(super) fn offer(&self, key: &str, owner: usize, port: u16) {
        self.lock().insert(key.into(), (owner, port));
    }

    /// `owner` no longer waits.
    pub(super) fn withdraw(&self, owner: usize) {
        self.lock().retain(|_, (other, _)| *other != owner);
    }

    /// Where the one with this key waits.
    pub(super) fn port(&self, key: &str) -> Option<u16> {
        self.lock().get(key).map(|(_, port)| *port)
    }

    fn forget(&self, key: &str) {
        self.lock().remove(key);
    }
}

/// A call that runs in a thread of its own.
struct Running {
    session: u64,
    patience: Option<Duration>,
    status: Mutex<Option<i32>>,
    done: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Tokens {
    made: i64,
    running: BTreeMap<i64, Arc<Running>>,
}

static TOKENS: Mutex<Tokens> = Mutex::new(Tokens { made: 0, running: BTreeMap::new() });

fn tokens() -> MutexGuard<'static, Tokens> {
    TOKENS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does `work` in a thread; the token is for [`wait`]. It is there before the thread is, and not at all once the session is
/// being destroyed: whoever destroys it sets that first, and then forgets the tokens.
pub(super) fn spawn(
    session: u64,
    handle: &Handle,
    work: impl FnOnce() -> i32 + Send + 'static,
) -> Result<i64, Failure> {
    let running = Arc::new(Running {
        session,
        patience: handle.patience(),
        status: Mutex::new(None),
        done: Condvar::new(),
        thread: Mutex::new(None),
    });
    let token = {
        let mut tokens = tokens();
        if handle.closing() {
            return Err(destroyed());
        }
        tokens.made += 1;
        let token = tokens.made;
        tokens.running.insert(token, running.clone());
        token
    };
    let theirs = running.clone();
    let thread = std::thread::Builder::new()
        .name("catalyst-async".into())
        .spawn(move || {
            let status = work();
            *theirs.status.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
            theirs.done.notify_all();
        })
        .map_err(|error| {
            tokens().running.remove(&token);
            let code = if error.kind() == std::io::ErrorKind::OutOfMemory { MEMORY } else { ERROR };
            Failure { code, text: format!("no thread can be had for it: {error}; raise the limit (ulimit -u)") }
        })?;
    *running.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    Ok(token)
}

/// Waits for the end of a call and gives its status, which has been told on stderr already. The token is forgotten.
pub(super) fn wait(token: i64) -> Result<i32, Failure> {
    // What the call that should have given a token returned instead.
    if matches!(i32::try_from(token), Ok(ERROR | MEMORY | TIMEOUT | STUCK)) {
        return Ok(token as i32);
    }
    let Some(running) = tokens().running.get(&token).cloned() else {
        return Err(Failure::new(format!(
            "{token} is no token: it has been awaited, its session was destroyed, or no call gave it"
        )));
    };
    let patience = running.patience.map(|patience| patience * 2 + Duration::from_secs(1));
    let Some(status) = running.wait(patience) else {
        return Err(Failure::stuck(
            "the call has not ended within its own deadlines; await it again, or destroy the session",
        ));
    };
    tokens().running.remove(&token);
    Ok(status)
}

/// Forgets the tokens of a session that is being destroyed, waiting a little for its threads to end.
pub(super) fn forget(session: u64, bound: Duration) {
    let mut all = Vec::new();
    tokens().running.retain(|_, running| {
        let theirs = running.session == session;
        if theirs {
            all.push(running.clone());
        }
        !theirs
    });
    for running in all {
        running.wait(Some(bound));
    }
}

impl Running {
    /// The status, and the thread joined.
    fn wait(&self, bound: Option<Duration>) -> Option<i32> {
        let deadline = bound.map(|bound| Instant::now() + bound);
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        while status.is_none() {
            status = match deadline {
                None => self.done.wait(status).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.checked_duration_since(Instant::now())?;
                    self.done.wait_timeout(status, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // Nothing but the end of the closure is left of it.
            let _ = thread.join();
        }
        *status
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capi::backend::Backend;

    fn made(key: &str) -> u64 {
        insert(Handle::new(Backend::Memcpy, Role::Controller, key, "").unwrap())
    }

    fn has_token(session: u64) -> bool {
        tokens().running.values().any(|running| running.session == session)
    }

    #[test]
    fn a_token_is_there_before_its_thread() {
        let session = made("a_token_is_there_before_its_thread");
        let handle = find(session).unwrap();
        let token = spawn(session, &handle, move || i32::from(has_token(session))).unwrap();
        assert_eq!(wait(token), Ok(1));
        assert!(!has_token(session));
        remove(session).unwrap().destroy().unwrap();
    }

    #[test]
    fn a_destroyed_session_gets_no_token() {
        let session = made("a_destroyed_session_gets_no_token");
        // As a call that has found the session just before another thread destroys it.
        let handle = find(session).unwrap();
        remove(session).unwrap().destroy().unwrap();
        forget(session, Duration::ZERO);
        let refused = spawn(session, &handle, || panic!("nothing runs for a session that is gone")).unwrap_err();
        assert!(refused.text.contains("destroyed"), "{}", refused.text);
        assert!(!has_token(session));
    }
}
